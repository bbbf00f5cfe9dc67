"""What a worker measures and says of itself when it has loaded its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from splitserve.config import EngineConfig, WorkerConfig
from splitserve.engine import ceilings
from splitserve.engine.ceilings import cache_path
from splitserve.engine.model_runner import ModelRunner
from splitserve.wire import messages as m
from splitserve.worker_process import facts_of, make_recorder
from tests.tiny_models import make_tiny_llama

needs_bf16 = pytest.mark.skipif(
    not torch.cpu.get_capabilities().get("avx512_bf16", False),
    reason="this CPU does not multiply bfloat16 (AVX-512 BF16)",
)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of this test's own, and measurements of milliseconds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(ceilings, "_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(ceilings, "_COPY_S", 0.0)
    monkeypatch.setattr(ceilings, "_MATMUL_SIZES", (64,))
    monkeypatch.setattr(ceilings, "_MATMUL_S", 0.0)


def hello_of(directory: Path, **changes: Any) -> m.WorkerFacts:
    engine = EngineConfig(str(directory), num_blocks=8, num_threads=1, **changes)
    config = WorkerConfig("decode", engine, "tcp://127.0.0.1:9", "decode-0")
    runner = ModelRunner.load(engine)
    return facts_of(config, runner, make_recorder(runner))


@needs_bf16
@pytest.mark.parametrize("key", ["quantization", "kv_cache_dtype"])
def test_the_compute_roof_is_of_what_is_multiplied(tiny: Path, key: str) -> None:
    """Numbers in int8 are widened before a product."""
    said = hello_of(tiny, dtype="bfloat16", **{key: "int8"})
    assert said.ceilings is not None
    [measured] = json.loads(cache_path().read_text())
    assert "bfloat16" in measured


@pytest.mark.parametrize(
    ("changes", "weights", "kv"),
    [
        pytest.param({"dtype": "float32"}, 4, 4),
        pytest.param({"dtype": "bfloat16"}, 2, 2),
        pytest.param({"dtype": "bfloat16", "quantization": "int8"}, 1, 2, marks=needs_bf16),
        pytest.param({"dtype": "bfloat16", "kv_cache_dtype": "int8"}, 2, 1, marks=needs_bf16),
    ],
)
def test_weights_and_kv_have_widths_of_their_own(
    tiny: Path, changes: dict[str, Any], weights: int, kv: int
) -> None:
    said = hello_of(tiny, **changes)
    assert (said.weight_bytes_per_number, said.layout.bytes_per_number) == (weights, kv)
