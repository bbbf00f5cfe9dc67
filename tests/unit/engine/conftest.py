"""Tiny checkpoints and what transformers says they answer, made once a test run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from splitserve.config import EngineConfig
from splitserve.engine.model_runner import ModelRunner
from tests.tiny_models import make_tiny_llama

LoadRunner = Callable[..., ModelRunner]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture
def load() -> LoadRunner:
    """Load a runner in f32 on one thread, with enough blocks for any test here."""

    def load_runner(directory: Path, **changes: object) -> ModelRunner:
        options: dict[str, object] = {"dtype": "float32", "num_blocks": 96, "num_threads": 1}
        return ModelRunner.load(EngineConfig(str(directory), **(options | changes)))  # type: ignore[arg-type]

    return load_runner


def expected_logits(directory: Path, token_ids: list[int]) -> Tensor:
    """transformers' logits [tokens, vocab] of a whole prompt, in f32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits
