"""A whole model by the Triton backend."""

from __future__ import annotations

from pathlib import Path

import torch

from splitserve.config import EngineConfig
from splitserve.engine.batch import Chunk
from splitserve.engine.model_runner import ModelRunner
from tests.tiny_models import make_tiny_llama
from tests.unit.engine.sequences import Prompts, chunk


def test_its_logits_are_those_of_the_reference(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "llama")
    prompts = Prompts(32)
    long, short = prompts.token_ids(70), prompts.token_ids(9)
    long_blocks, short_blocks = prompts.blocks(70), prompts.blocks(9)
    steps: list[list[Chunk]] = [
        [chunk(long, 0, 40, long_blocks)],
        [chunk(long, 40, 69, long_blocks), chunk(short, 0, 8, short_blocks)],
        [chunk(long, 69, 70, long_blocks), chunk(short, 8, 9, short_blocks)],
    ]

    def logits_by(backend: str) -> list[torch.Tensor]:
        config = EngineConfig(
            str(directory),
            dtype="float32",
            num_blocks=32,
            num_threads=1,
            attention_backend=backend,  # type: ignore[arg-type]
        )
        runner = ModelRunner.load(config)
        return [runner.logits(step) for step in steps]

    for found, expected in zip(logits_by("triton"), logits_by("reference"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
