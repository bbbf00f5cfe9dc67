"""The whole engine on tiny models, held to transformers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from splitserve.engine.batch import Chunk
from splitserve.engine.model_runner import ModelRunner
from splitserve.work import StepSpent, StepWork
from tests.unit.engine.conftest import LoadRunner, expected_logits
from tests.unit.engine.sequences import Prompts, chunk, row

NUM_BLOCKS = 96


def logits_everywhere(
    runner: ModelRunner, token_ids: Sequence[int], ends: Sequence[int], blocks: Sequence[int]
) -> Tensor:
    """Logits after each of `ends`, computing one chunk up to each."""
    starts = [0, *ends[:-1]]
    steps = zip(starts, ends, strict=True)
    return torch.cat([runner.logits([chunk(token_ids, a, b, blocks)]) for a, b in steps])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("size", [1, 7, 16, 24, 64, 100])
def test_chunked_prefill_equals_transformers(
    tiny_llama: Path, load: LoadRunner, backend: str, size: int
) -> None:
    runner = load(tiny_llama, attention_backend=backend)
    prompts = Prompts(NUM_BLOCKS)
    token_ids = prompts.token_ids(100)
    ends = [*range(size, 100, size), 100]
    found = logits_everywhere(runner, token_ids, ends, prompts.blocks(100))
    expected = expected_logits(tiny_llama, token_ids)[[end - 1 for end in ends]]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("block_size", [1, 4, 16, 33])
def test_any_block_size(tiny_llama: Path, load: LoadRunner, block_size: int) -> None:
    runner = load(tiny_llama, block_size=block_size, num_blocks=120)
    prompts = Prompts(120, block_size)
    token_ids = prompts.token_ids(60)
    found = logits_everywhere(runner, token_ids, [23, 59, 60], prompts.blocks(60))
    expected = expected_logits(tiny_llama, token_ids)[[22, 58, 59]]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_ragged_mixes_equal_transformers(tiny_llama: Path, load: LoadRunner, backend: str) -> None:
    """Five sequences in each step, each at its own pace: chunks and decode rows side by side."""
    runner = load(tiny_llama, attention_backend=backend)
    prompts = Prompts(NUM_BLOCKS)
    paces = {90: (31, 31, 28), 33: (32, 1), 120: (100, 17, 1, 1, 1), 5: (1,) * 5, 64: (64,)}
    histories = {length: prompts.token_ids(length) for length in paces}
    blocks = {length: prompts.blocks(length) for length in paces}
    found: dict[int, list[Tensor]] = {length: [] for length in paces}
    done = dict.fromkeys(paces, 0)
    ends: dict[int, list[int]] = {length: [] for length in paces}
    for sizes in itertools.zip_longest(*paces.values(), fillvalue=0):
        step = {length: size for length, size in zip(paces, sizes, strict=True) if size}
        chunks = [
            chunk(histories[length], done[length], done[length] + size, blocks[length])
            for length, size in step.items()
        ]
        for length, logits in zip(step, runner.logits(chunks), strict=True):
            done[length] += step[length]
            ends[length].append(done[length])
            found[length].append(logits)
    for length in paces:
        expected = expected_logits(tiny_llama, histories[length])[[e - 1 for e in ends[length]]]
        torch.testing.assert_close(torch.stack(found[length]), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_its_batch_mates(
    tiny_llama: Path, load: LoadRunner, dtype: str
) -> None:
    runner = load(tiny_llama, dtype=dtype)
    prompts = Prompts(NUM_BLOCKS)
    chunks = []
    for length in (50, 20, 51, 130, 7, 64, 65, 90, 33, 12):
        token_ids, blocks = prompts.token_ids(length), prompts.blocks(length)
        runner.logits([chunk(token_ids, 0, length - 1, blocks)])
        chunks.append(chunk(token_ids, length - 1, length, blocks))
    alone = runner.logits(chunks[:1])
    for others in range(1, len(chunks)):
        assert torch.equal(runner.logits(chunks[: others + 1])[:1], alone)


def test_greedy_tokens_equal_generate(tiny_llama: Path, load: LoadRunner) -> None:
    runner = load(tiny_llama)
    prompts = Prompts(NUM_BLOCKS)
    history, blocks = prompts.token_ids(20), prompts.blocks(40)
    start = 0
    for _ in range(20):
        [(token,)] = runner.step([chunk(history, start, len(history), blocks)])
        start = len(history)
        history.append(token.token_id)
    logits = expected_logits(tiny_llama, history)
    assert history[20:] == logits[19:-1].argmax(-1).tolist()


def test_a_step_answers_chunk_by_chunk(tiny_llama: Path, load: LoadRunner) -> None:
    runner = load(tiny_llama)
    prompts = Prompts(NUM_BLOCKS)
    a, b, c = (prompts.token_ids(n) for n in (9, 10, 11))
    silent = Chunk(a, 0, 9, prompts.blocks(9))
    twice = Chunk(b, 0, 10, prompts.blocks(10), (row(b, 0), row(b, 1)))
    once = chunk(c, 0, 11, prompts.blocks(11))
    answers = runner.step([silent, twice, once])
    assert [len(answer) for answer in answers] == [0, 2, 1]
    expected = [int(expected_logits(tiny_llama, ids)[-1].argmax()) for ids in (b, b, c)]
    assert [token.token_id for answer in answers for token in answer] == expected
    assert runner.step([silent]) == [()]


def test_a_prompt_moves_to_another_runner(tiny_llama: Path, load: LoadRunner) -> None:
    """What a hand-off does: KV read out of one cache, written into other blocks of another."""
    from splitserve.wire.messages import Region

    first, second = load(tiny_llama), load(tiny_llama)
    prompts = Prompts(NUM_BLOCKS)
    token_ids = prompts.token_ids(41)
    here, there = prompts.blocks(41), prompts.blocks(41)
    first.logits([chunk(token_ids, 0, 40, here)])
    region = Region(0, 2, 0, 40, 0, 2)
    second.kv_cache.write(there, region, first.kv_cache.read(here, region))
    at_home, away = (
        runner.logits([chunk(token_ids, 40, 41, blocks)])
        for runner, blocks in ((first, here), (second, there))
    )
    assert torch.equal(at_home, away)


def test_a_fork_continues_from_copied_blocks(tiny_llama: Path, load: LoadRunner) -> None:
    runner = load(tiny_llama)
    prompts = Prompts(NUM_BLOCKS)
    token_ids = prompts.token_ids(20)
    blocks = prompts.blocks(20)
    [copied] = prompts.blocks(1)
    runner.logits([chunk(token_ids, 0, 19, blocks)])
    runner.copy_blocks([(blocks[1], copied)])
    original = runner.logits([chunk(token_ids, 19, 20, blocks)])
    runner.kv_cache.tensor[:, :, blocks[1]] = 0
    assert torch.equal(runner.logits([chunk(token_ids, 19, 20, [blocks[0], copied])]), original)


@pytest.mark.parametrize("num_blocks", [1, 3, 50])
def test_warm_up_leaves_an_empty_cache(tiny_llama: Path, load: LoadRunner, num_blocks: int) -> None:
    runner = load(tiny_llama, num_blocks=num_blocks)
    runner.warm_up()
    assert runner.kv_cache.tensor.count_nonzero() == 0


def test_a_step_tells_what_it_took_and_did(tiny_llama: Path, load: LoadRunner) -> None:
    runner = load(tiny_llama)
    prompts = Prompts(NUM_BLOCKS)
    a, b = prompts.token_ids(30), prompts.token_ids(9)
    chunks = [
        Chunk(a, 0, 30, prompts.blocks(30)),
        Chunk(b, 0, 9, prompts.blocks(9), (row(b, 0), row(b, 1))),
    ]
    runner.step(chunks)
    spent = runner.take_spent()
    assert min(spent.prepare_s, spent.forward_s, spent.sample_s) > 0
    # Two choices of a prompt share its row of logits.
    lens = np.array([30, 9])
    assert spent.work == runner.work_model.of(lens, lens, num_logits_rows=1)
    assert runner.take_spent() == StepSpent()


def test_a_retried_step_tells_the_sum(tiny_llama: Path, load: LoadRunner) -> None:
    """As step.compute does it: the batch fails, then each chunk has a pass of its own."""
    runner = load(tiny_llama)
    prompts = Prompts(NUM_BLOCKS)
    token_ids, blocks = prompts.token_ids(20), prompts.blocks(20)
    good = chunk(token_ids, 0, 20, blocks)
    runner.step([good])
    once = runner.take_spent().work
    with pytest.raises(IndexError):
        runner.step([good, chunk([runner.vocab_size], 0, 1, prompts.blocks(1))])
    failed = runner.take_spent()
    assert failed.forward_s > 0 and failed.work == StepWork()
    runner.step([good])
    runner.step([good])
    assert runner.take_spent().work == once + once


def test_warming_up_is_no_step(tiny_llama: Path, load: LoadRunner) -> None:
    runner = load(tiny_llama)
    runner.warm_up()
    assert runner.take_spent() == StepSpent()


def test_several_threads_agree(tiny_llama: Path, load: LoadRunner) -> None:
    prompts = Prompts(NUM_BLOCKS)
    token_ids, blocks = prompts.token_ids(70), prompts.blocks(70)
    results = []
    try:
        for num_threads in (1, 2):
            runner = load(tiny_llama, num_threads=num_threads)
            assert torch.get_num_threads() == runner.num_threads == num_threads
            results.append(logits_everywhere(runner, token_ids, [60, 69, 70], blocks))
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-5)
