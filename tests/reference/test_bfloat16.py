"""bfloat16 on the real weights is within a bound of float32, by logits."""

from __future__ import annotations

from benchmarks.bf16_reference import CACHE_TOKENS, measure
from benchmarks.quality import FORMATS, load
from splitserve.engine.cpu.decoder import CpuDecoder
from splitserve.models import resolve_model
from tests.reference import prose_cases
from tests.reference.make_reference import MODEL

EVERY = 8  # of the 200 prompts; `python -m benchmarks.bf16_reference` takes all


def test_bfloat16_is_no_further_from_float32_than_it_must_be() -> None:
    directory = resolve_model(MODEL).directory
    runner = load(directory, FORMATS["bfloat16"], CACHE_TOKENS)
    found = measure(runner, directory, prose_cases()[::EVERY])
    # The compiled decoder keeps in float32 what torch rounds after every operation.
    is_compiled = isinstance(runner._decoder, CpuDecoder)
    share, largest, lost = (0.6, 3.0, 0.15) if is_compiled else (1.25, 4.0, 0.6)
    assert found.ours.mean < share * found.transformers.mean
    assert found.ours.largest < largest
    assert max(found.ours.lost_margins, default=0.0) < lost
