"""The whole step on a GPU: held to transformers, graphs to launches, transfers beside steps.

These need transformers, tokenizers and safetensors too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from splitserve.config import EngineConfig
from splitserve.engine.batch import Chunk, SampleRow
from splitserve.engine.ceilings import measure
from splitserve.engine.model_runner import ModelRunner
from splitserve.errors import ConfigError
from splitserve.request import SampledToken, Sampling
from tests.kernels.boxes import Box
from tests.kernels.steps import mixed_steps, single_rows
from tests.tiny_models import make_tiny_model
from tests.unit.engine.conftest import expected_logits
from tests.unit.engine.sequences import Prompts, chunk

DEVICE = "cuda:0"
NUM_BLOCKS, MOST_SEQS = 512, 20
FAMILIES = ("llama", "qwen2", "qwen3")
SIZES: dict[str, Any] = {
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
}
LAYERS, KV_HEADS = 4, 2
WALL_S, NUM_STEPS = 60.0, 30
MakeRunner = Callable[..., ModelRunner]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_tiny_model(family, root / family, **SIZES) for family in FAMILIES}


@pytest.fixture(scope="module")
def load(directories: dict[str, Path]) -> MakeRunner:
    def load_runner(family: str = "llama", **changes: object) -> ModelRunner:
        options: dict[str, object] = {"dtype": "float32", "num_blocks": NUM_BLOCKS}
        options |= {"max_num_seqs": MOST_SEQS} | changes
        return ModelRunner.load(EngineConfig(str(directories[family]), **options), DEVICE)  # type: ignore[arg-type]

    return load_runner


@pytest.fixture(scope="module")
def warm(load: MakeRunner) -> ModelRunner:
    runner = load()
    runner.warm_up()
    return runner


@pytest.mark.parametrize("family", FAMILIES)
def test_its_logits_are_those_of_transformers(
    directories: dict[str, Path], load: MakeRunner, family: str
) -> None:
    runner = load(family)
    runner.warm_up()
    assert runner.kv_cache.tensor.count_nonzero() == 0
    histories, steps = mixed_steps()
    expected = {n: expected_logits(directories[family], ids) for n, ids in histories.items()}
    for chunks in steps:
        found = runner.logits(chunks).cpu()
        rows = [expected[len(part.token_ids)][part.end - 1] for part in chunks]
        torch.testing.assert_close(found, torch.stack(rows), rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near(load: MakeRunner, warm: ModelRunner, dtype: str) -> None:
    runner = load(dtype=dtype)
    runner.warm_up()
    for chunks in mixed_steps()[1]:
        found, expected = runner.logits(chunks).float(), warm.logits(chunks)
        assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_graphs_equal_launches(load: MakeRunner, dtype: str) -> None:
    """But for the products of matrices, which libraries compute by the number of rows."""
    launched, captured = load(dtype=dtype), load(dtype=dtype)
    captured.warm_up()
    steps = mixed_steps()[1]
    steps += [single_rows(count) for count in range(1, MOST_SEQS + 2)]
    prompts = Prompts(NUM_BLOCKS)
    for length in (1024, 1025, 3000):  # another pass, and table, for each
        token_ids, blocks = prompts.token_ids(length), prompts.blocks(length)
        steps += [[chunk(token_ids, 0, length - 1, blocks)]]
        steps += [[chunk(token_ids, length - 1, length, blocks)]]
    for chunks in steps:
        found, expected = captured.logits(chunks).float(), launched.logits(chunks).float()
        least = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 4e-3}[dtype]
        assert (found - expected).norm() <= least * expected.norm()


def test_a_step_answers_with_tokens_drawn_on_the_gpu(warm: ModelRunner) -> None:
    rows = single_rows(4)
    random = Sampling(max_tokens=4, temperature=1.0, top_p=0.9, logprobs=2)
    drawn = [
        Chunk(
            part.token_ids,
            part.start,
            part.end,
            part.block_ids,
            (SampleRow(random, 7, 0, 1, part.token_ids),),
        )
        for part in rows
    ]
    first, again = warm.step(drawn), warm.step(drawn)
    assert [t[0].token_id for t in first] == [t[0].token_id for t in again]
    logits = warm.logits(rows)
    assert [t[0].token_id for t in warm.step(rows)] == logits.argmax(-1).tolist()
    spent = warm.take_spent()
    assert spent.forward_s > 0 and spent.work.num_bytes > 0


def test_memory_that_is_left_open_is_filled(load: MakeRunner) -> None:
    free, total = torch.cuda.mem_get_info(DEVICE)
    share = min(0.05, free / total / 2)
    runner = load(num_blocks=None, gpu_memory_utilization=share, max_num_batched_tokens=512)
    assert 0.2 < runner.kv_cache.tensor.nbytes / (total * share) <= 1
    with pytest.raises(ConfigError, match="leaves no room for KV"):
        load(num_blocks=None, gpu_memory_utilization=1e-6)


def test_a_prompt_moves_to_another_runner(load: MakeRunner, warm: ModelRunner) -> None:
    other = load()
    prompts = Prompts(NUM_BLOCKS)
    token_ids, here, there = prompts.token_ids(401), prompts.blocks(401), prompts.blocks(401)
    warm.step([Chunk(token_ids, 0, 400, here)])
    box = Box(0, LAYERS, 0, 400, 0, KV_HEADS)
    data = warm.kv_cache.read(here, box)
    other.kv_cache.write(there, box, data)
    assert other.kv_cache.read(there, box) == data
    last = [chunk(token_ids, 400, 401, here)], [chunk(token_ids, 400, 401, there)]
    torch.testing.assert_close(other.logits(last[1]), warm.logits(last[0]), rtol=0, atol=1e-4)


def test_blocks_are_read_and_written_while_steps_run(warm: ModelRunner) -> None:
    prompts = Prompts(NUM_BLOCKS)
    token_ids, mine, others = prompts.token_ids(3000), prompts.blocks(3000), prompts.blocks(640)
    step, cache = [chunk(token_ids, 0, 3000, mine)], warm.kv_cache
    [[expected]] = warm.step(step)
    all_mine, box = Box(0, LAYERS, 0, 3000, 0, KV_HEADS), Box(0, LAYERS, 0, 640, 0, KV_HEADS)
    before = cache.read(mine, all_mine)
    generator = torch.Generator().manual_seed(1)
    size = len(cache.read(others, box))
    found: list[SampledToken] = []

    def steps() -> None:
        for _ in range(NUM_STEPS):
            found.append(warm.step(step)[0][0])

    thread = threading.Thread(target=steps)
    thread.start()
    rounds = 0
    while thread.is_alive() or rounds == 0:
        numbers = torch.randint(256, (size,), dtype=torch.uint8, generator=generator).numpy()
        cache.write(others, box, numbers.data)
        assert cache.read(others, box) == numbers.data
        rounds += 1
    thread.join(WALL_S)
    assert found == [expected] * NUM_STEPS
    assert cache.read(mine, all_mine) == before


def test_copied_blocks_are_there_before_they_are_read(warm: ModelRunner) -> None:
    prompts = Prompts(NUM_BLOCKS)
    sources, targets = prompts.blocks(640), prompts.blocks(640)
    box = Box(0, LAYERS, 0, 640, 0, KV_HEADS)
    warm.kv_cache.tensor.normal_()
    warm.copy_blocks(list(zip(sources, targets, strict=True)))
    assert warm.kv_cache.read(targets, box) == warm.kv_cache.read(sources, box)


def test_the_reference_runs_there_too(load: MakeRunner, warm: ModelRunner) -> None:
    plain = load(attention_backend="reference")
    plain.warm_up()
    for chunks in mixed_steps()[1]:
        torch.testing.assert_close(plain.logits(chunks), warm.logits(chunks), rtol=0, atol=1e-3)


def test_roofs_are_no_nonsense() -> None:
    found = measure(torch.bfloat16, DEVICE)
    assert 1e10 < found.bytes_per_s < 1e14
    assert 1e12 < found.flops_per_s < 1e17
