"""After a runner's warm-up no step, read or write launches a kernel that isn't compiled yet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from splitserve.config import EngineConfig
from splitserve.engine.attention.base import AttentionShape
from splitserve.engine.attention.triton_backend import TritonAttention
from splitserve.engine.gpu.decoder import GpuDecoder
from splitserve.engine.gpu.kv_cache import GpuKVCache
from splitserve.engine.gpu.passes import Limits
from splitserve.engine.loading import Loaded
from splitserve.engine.model_runner import ModelRunner
from splitserve.engine.models.config import read_config
from splitserve.engine.models.rope import Rope
from splitserve.engine.resolve import layout_of, resolve
from tests.kernels.boxes import Box
from tests.kernels.compiled.launches import record
from tests.tiny_models import make_tiny_model
from tests.unit.engine.sequences import Prompts, chunk

NUM_BLOCKS, MAX_MODEL_LEN = 300, 4096
MAX_NUM_SEQS = 17


def runner_of(directory: Path) -> ModelRunner:
    """As on a GPU, with tensors on the CPU: nothing runs here."""
    device = torch.device("cpu")
    asked = EngineConfig(
        str(directory),
        dtype="bfloat16",
        num_blocks=NUM_BLOCKS,
        num_threads=1,
        max_num_seqs=MAX_NUM_SEQS,
    )
    model, rope_config = read_config(directory)
    config = resolve(asked, model, rope_config, device)
    shape = (model.num_heads, model.num_kv_heads, model.head_dim)
    attention = TritonAttention(AttentionShape(*shape, model.head_dim**-0.5), torch.bfloat16)
    rope = Rope(rope_config, model.head_dim, MAX_MODEL_LEN)
    decoder = GpuDecoder.load(directory, model, rope, attention)
    cache = GpuKVCache(layout_of(config, model), NUM_BLOCKS, device)
    limits = Limits(MAX_NUM_SEQS, MAX_MODEL_LEN, config.block_size)

    def capture() -> None:
        """Runs each pass once, as a capture does."""
        decoder.capture(cache.tensor, limits)
        assert decoder._passes is not None
        for _, run in decoder._passes._passes.values():
            run()

    return ModelRunner(Loaded(config, model, decoder, cache, capture))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_nothing_is_left_to_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    directory = make_tiny_model(
        family, tmp_path / family, max_position_embeddings=MAX_MODEL_LEN, head_dim=64
    )
    launches = record(monkeypatch)
    runner = runner_of(directory)
    runner.warm_up()
    warm = {launch.specialization for launch in launches}
    launches.clear()

    prompts = Prompts(NUM_BLOCKS)
    decode = [
        chunk(prompts.token_ids(end), end - 1, end, prompts.blocks(end))
        for end in (1, 16, 17, 1024, 1025, *range(30, 42))
    ]
    long, blocks = prompts.token_ids(1000), prompts.blocks(1000)
    steps = [decode[:count] for count in range(1, len(decode) + 1)]
    steps += [
        [chunk(long, 0, 1, blocks)],
        [chunk(long, 0, 999, blocks)],
        [chunk(long, 7, 9, blocks)],
    ]
    steps += [[*decode, chunk(long, 16, 500, blocks)]]
    for chunks in steps:
        runner.logits(chunks)
    for box in (Box(0, 2, 0, 1000, 0, 2), Box(1, 2, 3, 19, 0, 2)):
        runner.kv_cache.write(blocks, box, runner.kv_cache.read(blocks, box))
    assert launches
    cold = [launch.name for launch in launches if launch.specialization not in warm]
    assert cold == []
