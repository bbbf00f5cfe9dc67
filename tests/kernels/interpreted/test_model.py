"""The whole decoder by Triton kernels, held to transformers, on tensors of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from splitserve.config import EngineConfig
from splitserve.engine.batch import Chunk
from splitserve.engine.gpu.decoder import GpuDecoder
from splitserve.engine.gpu.kv_cache import GpuKVCache
from splitserve.engine.gpu.passes import Limits
from splitserve.engine.model_runner import ModelRunner
from tests.kernels.steps import NUM_BLOCKS, mixed_steps, single_rows
from tests.tiny_models import make_tiny_model
from tests.unit.engine.conftest import expected_logits
from tests.unit.engine.sequences import Prompts, chunk, row

MOST_SEQS = 5
MakeRunner = Callable[..., ModelRunner]
# Norms of heads, biases, embeddings that are the LM head, heads that are no power of two.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"max_position_embeddings": 2048}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 48, "num_key_value_heads": 1}),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_tiny_model(family, root / name, **keys)
        for name, (family, keys) in MODELS.items()
    }


@pytest.fixture(scope="module")
def load(directories: dict[str, Path]) -> MakeRunner:
    def load_runner(name: str = "llama", **changes: object) -> ModelRunner:
        options: dict[str, object] = {"dtype": "float32", "num_blocks": NUM_BLOCKS}
        options |= {
            "num_threads": 1,
            "max_num_seqs": MOST_SEQS,
            "attention_backend": "triton",
        } | changes
        runner = ModelRunner.load(EngineConfig(str(directories[name]), **options))  # type: ignore[arg-type]
        assert isinstance(runner._decoder, GpuDecoder)
        assert isinstance(runner.kv_cache, GpuKVCache)
        return runner

    return load_runner


@pytest.fixture(scope="module")
def warm(load: MakeRunner) -> ModelRunner:
    """What is in its cache is nobody's: each test writes what it reads."""
    runner = load()
    runner.warm_up()
    return runner


@pytest.mark.parametrize("name", MODELS)
def test_its_logits_are_those_of_transformers(
    directories: dict[str, Path], load: MakeRunner, name: str
) -> None:
    runner = load(name)
    runner.warm_up()
    assert runner.kv_cache.tensor.count_nonzero() == 0
    histories, steps = mixed_steps()
    expected = {n: expected_logits(directories[name], ids) for n, ids in histories.items()}
    for chunks in steps:
        found = runner.logits(chunks)
        rows = [expected[len(part.token_ids)][part.end - 1] for part in chunks]
        torch.testing.assert_close(found, torch.stack(rows), rtol=0, atol=1e-4)


def test_captured_passes_equal_batches_that_are_launched(
    load: MakeRunner, warm: ModelRunner
) -> None:
    launched = load()
    _, steps = mixed_steps()
    for chunks in steps:
        found, expected = warm.logits(chunks), launched.logits(chunks)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        used = [block for part in chunks for block in part.block_ids]
        kept, written = (runner.kv_cache.tensor[:, :, used] for runner in (warm, launched))
        torch.testing.assert_close(kept, written, rtol=0, atol=1e-5)


def test_decode_rows_that_need_no_logits_or_several_tokens(warm: ModelRunner) -> None:
    prompts = Prompts(NUM_BLOCKS)
    a, b, c = (prompts.token_ids(n) for n in (9, 10, 11))
    decode = [
        Chunk(a, 0, 1, prompts.blocks(1)),
        Chunk(b, 0, 1, prompts.blocks(1), (row(b, 0), row(b, 1))),
        chunk(c, 0, 1, prompts.blocks(1)),
    ]
    found = warm.logits(decode)
    beside_a_chunk = warm.logits([*decode, Chunk(a, 0, 2, prompts.blocks(2))])
    assert len(found) == 3 and torch.equal(found[0], found[1])
    torch.testing.assert_close(found, beside_a_chunk, rtol=0, atol=1e-5)
    assert [len(tokens) for tokens in warm.step(decode)] == [0, 2, 1]


def test_a_longer_context_takes_another_pass(load: MakeRunner, warm: ModelRunner) -> None:
    launched = load()
    prompts = Prompts(NUM_BLOCKS)
    for length in (1024, 1025):
        rows = [chunk(prompts.token_ids(length), length - 1, length, range(65)), *single_rows(1)]
        for runner in (warm, launched):
            runner.kv_cache.tensor.fill_(0.5)
        torch.testing.assert_close(warm.logits(rows), launched.logits(rows), rtol=0, atol=1e-5)


def test_sizes_of_passes() -> None:
    limits = Limits(max_num_seqs=20, max_model_len=9000, block_size=16)
    assert limits.num_rows == [1, 2, 4, 8, 16, 20]
    assert limits.contexts == [1024, 8192, 9000]
    assert (Limits(1, 1024, 16).num_rows, Limits(1, 1024, 16).contexts) == ([1], [1024])
    assert Limits(4, 8192, 16).num_rows == [1, 2, 4]


def test_what_was_returned_is_not_overwritten(warm: ModelRunner) -> None:
    first, second = single_rows(2)
    found = warm.logits([first])
    before = found.clone()
    warm.logits([second])
    assert torch.equal(found, before)


@pytest.mark.parametrize("num_rows", [MOST_SEQS, MOST_SEQS + 1])
def test_more_rows_than_any_pass_has_are_launched(warm: ModelRunner, num_rows: int) -> None:
    rows = single_rows(num_rows)
    alone = torch.cat([warm.logits([part]) for part in rows])
    torch.testing.assert_close(warm.logits(rows), alone, rtol=0, atol=1e-5)


def test_a_fork_continues_from_copied_blocks(warm: ModelRunner) -> None:
    prompts = Prompts(NUM_BLOCKS)
    token_ids, blocks, copied = prompts.token_ids(20), prompts.blocks(20), prompts.blocks(1)
    warm.logits([chunk(token_ids, 0, 19, blocks)])
    warm.copy_blocks([(blocks[1], copied[0])])
    original = warm.logits([chunk(token_ids, 19, 20, blocks)])
    warm.kv_cache.tensor[:, :, blocks[1]] = 0
    assert torch.equal(warm.logits([chunk(token_ids, 19, 20, [blocks[0], *copied])]), original)


@pytest.mark.parametrize("token_id", [-1, 260])
@pytest.mark.parametrize("length", [1, 3])
def test_a_token_id_is_no_place_in_memory(warm: ModelRunner, length: int, token_id: int) -> None:
    with pytest.raises(IndexError, match=f"token id {token_id} is not in 0 to 259"):
        warm.logits([chunk([token_id] * length, 0, length, [0])])


def test_half_precision_is_near(load: MakeRunner) -> None:
    runner, exact = load(dtype="bfloat16"), load()
    prompts = Prompts(NUM_BLOCKS)
    prompt = chunk(prompts.token_ids(20), 0, 20, prompts.blocks(20))
    found, expected = runner.logits([prompt]), exact.logits([prompt])
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() < 0.05 * expected.norm()
