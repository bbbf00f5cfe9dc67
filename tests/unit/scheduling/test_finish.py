import pytest

from splitserve.request import FinishReason, Sampling
from splitserve.scheduling.finish import finish_reason


@pytest.mark.parametrize(
    ("sampling", "token_id", "place", "reason"),
    [
        (Sampling(max_tokens=4, eos_token_ids=(2,)), 2, 1, "stop"),
        (Sampling(max_tokens=4, eos_token_ids=(2,), ignore_eos=True), 2, 1, None),
        (Sampling(max_tokens=4, eos_token_ids=(2,), ignore_eos=True), 2, 4, "length"),
        (Sampling(max_tokens=4, stop_token_ids=(9,), ignore_eos=True), 9, 1, "stop"),
        (Sampling(max_tokens=1), 5, 1, "length"),
        (Sampling(max_tokens=4, min_tokens=2, eos_token_ids=(2,)), 2, 2, None),
        (Sampling(max_tokens=4, min_tokens=2, eos_token_ids=(2,)), 2, 3, "stop"),
        (Sampling(max_tokens=3, eos_token_ids=(2,)), 2, 3, "stop"),
        (Sampling(max_tokens=3), 5, 2, None),
    ],
)
def test_finish_reason(
    sampling: Sampling, token_id: int, place: int, reason: FinishReason | None
) -> None:
    assert finish_reason(sampling, token_id, place) == reason
