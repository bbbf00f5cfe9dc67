import pytest

from splitserve.request import SampledToken, TokenLogprobs
from splitserve.scheduling.chunking import plan_chunks
from splitserve.scheduling.sequence import Sequence, blocks_to_begin, first_rows, fork, take_row
from tests.unit.requests import make_request


def prompt_of(num_tokens: int, n: int, block_size: int = 4) -> Sequence:
    request = make_request("a", num_tokens, n=n)
    prompt = Sequence(request, request.choices, list(request.token_ids), order=1)
    own = num_tokens // block_size + 1
    block_ids = list(range(100, 100 + blocks_to_begin(num_tokens, n, block_size)))
    prompt.block_ids, prompt.spare_block_ids = block_ids[:own], block_ids[own:]
    return prompt


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8])
def test_forks_share_full_blocks_and_own_the_last(num_tokens: int) -> None:
    prompt = prompt_of(num_tokens, n=3)
    first = [(choice, SampledToken(50 + i)) for i, choice in enumerate(prompt.choices)]
    forked = fork(prompt, first, 4)
    full = num_tokens // 4
    assert [len(s.block_ids) for s in forked.sequences] == [full + 1] * 3
    assert all(s.block_ids[:full] == forked.shared for s in forked.sequences)
    assert len({s.block_ids[-1] for s in forked.sequences}) == 3
    assert forked.unused == []
    partial = prompt.block_ids[-1]
    expected = [(partial, s.block_ids[-1]) for s in forked.sequences[1:]]
    assert forked.copies == (expected if num_tokens % 4 else [])
    assert [s.token_ids[-1] for s in forked.sequences] == [50, 51, 52]
    assert all(s.num_computed == num_tokens for s in forked.sequences)


def test_a_choice_that_ended_leaves_its_block() -> None:
    prompt = prompt_of(6, n=3)
    forked = fork(prompt, [(prompt.choices[2], SampledToken(5))], 4)
    assert len(forked.sequences) == 1
    assert forked.sequences[0].choices[0].choice_id == 2
    assert forked.unused == prompt.spare_block_ids
    assert forked.copies == []


def test_the_first_row_repeats_the_token_of_the_hand_off() -> None:
    prompt = prompt_of(5, n=1)
    sequence = fork(prompt, [(prompt.choices[0], SampledToken(9))], 4).sequences[0]
    sequence.append(SampledToken(8))
    row = take_row(sequence)
    assert (row.first_index, row.tokens) == (0, (9, 8))
    sequence.append(SampledToken(7))
    row = take_row(sequence)
    assert (row.first_index, row.tokens, row.finish) == (2, (7,), None)


def test_rows_carry_logprobs_and_the_finish_reason() -> None:
    request = make_request("a", 4, max_tokens=1)
    prompt = Sequence(request, request.choices, list(request.token_ids), order=1)
    rows = first_rows(prompt, [SampledToken(3, TokenLogprobs(-0.5))])
    assert rows[0].finish == "length"
    assert rows[0].logprobs == (TokenLogprobs(-0.5),)
    assert rows[0].first_index == 0


def test_chunks_cut_the_last_prompt_at_the_budget() -> None:
    first, second = prompt_of(5, 1), prompt_of(9, 1)
    plan = plan_chunks([first, second], 8)
    assert [(p.start, p.end, p.samples) for p in plan] == [(0, 5, True), (0, 3, False)]
    second.num_computed = 3
    assert [(p.start, p.end, p.samples) for p in plan_chunks([second], 8)] == [(3, 9, True)]


def shares(lengths: list[int], budget: int) -> list[int]:
    """How many tokens of each prompt a step computes; the oldest comes first."""
    sequences = [prompt_of(length, 1) for length in lengths]
    planned = {id(p.sequence): p.num_tokens for p in plan_chunks(sequences, budget)}
    assert sum(planned.values()) <= budget and 0 not in planned.values()
    return [planned.get(id(sequence), 0) for sequence in sequences]


def test_short_prompts_pass_a_huge_one_and_it_moves_on() -> None:
    """sgl-project/sglang PR#34554: one huge prompt took every prefill pass."""
    assert shares([4000, 5, 5, 5], 64) == [49, 5, 5, 5]
    assert shares([4000, *[30] * 4], 64) == [32, 30, 2, 0, 0], "half is the oldest's"
    assert shares([20, 4000, 5], 64) == [20, 39, 5]
    assert shares([4000, 4000], 64) == [64, 0], "of equals the oldest goes first"
    assert shares([256, 256, 256], 512) == [256, 256, 0]


def test_answers_go_before_prompts_and_the_oldest_prompt_still_moves() -> None:
    assert shares([1, 1, 100, 1], 8) == [1, 1, 5, 1]
    assert shares([100, 1, 1, 1, 3], 5) == [1, 1, 1, 1, 1]
