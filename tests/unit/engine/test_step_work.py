"""The work of a step: by hand for one model, and as torch and transformers count it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from splitserve.config import KVLayout
from splitserve.engine.models.config import ModelConfig, read_config
from splitserve.engine.step_work import CudaStepMeter, StepMeter, WorkModel, meter_for
from splitserve.work import StepSpent, StepWork
from tests.tiny_models import LLAMA

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SMOLLM2: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, biased": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "a KV head for each query head": ("llama", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"head_dim": 16}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 biased": ("qwen3", {"attention_bias": True}),
}


def configs(model_type: str, directory: Path, **keys: Any) -> tuple[Any, ModelConfig]:
    """transformers' config and ours, of the same config.json."""
    theirs = AutoConfig.for_model(model_type, **{**LLAMA, **keys})
    theirs.save_pretrained(directory)
    return theirs, read_config(directory)[0]


def work_model(model: ModelConfig, dtype: str = "float32") -> WorkModel:
    layout = KVLayout(dtype, model.num_layers, model.num_kv_heads, model.head_dim, 16)
    return WorkModel.from_shapes(model, layout, DTYPES[dtype])


def work(model: WorkModel, sequences: list[tuple[int, int]], num_logits_rows: int) -> StepWork:
    """`sequences`: tokens in the chunk, and up to its end."""
    query_lens, context_lens = np.array(sequences, np.int64).T
    return model.of(query_lens, context_lens, num_logits_rows)


# -- by hand ----------------------------------------------------------------------------------


def test_a_step_by_hand(tmp_path: Path) -> None:
    """Hidden 64, inner 128, 4 query and 2 KV heads of 32, 2 layers, vocabulary 260, f32."""
    _, model = configs("llama", tmp_path)
    matrices = 2 * ((128 + 64 + 64) * 64 + 64 * 128 + 2 * 128 * 64 + 64 * 128)
    norms = 2 * 2 * 64
    kv_token_bytes = 2 * 2 * 2 * 32 * 4
    # A prompt's last 3 tokens of 5 see 3, 4 and 5; a decode row of 9 sees 9.
    found = work(work_model(model), [(3, 5), (1, 9)], num_logits_rows=2)
    assert found.num_flops == 4 * 2 * matrices + 21 * 4 * 4 * 32 * 2 + 2 * 2 * 64 * 260
    weights = 4 * (matrices + norms + 64 + 260 * 64)
    looked_up = 4 * (4 * 64)
    assert found.num_bytes == weights + looked_up + (5 + 9 + 3 + 1) * kv_token_bytes


def test_without_logits_the_head_stays_where_it_is(tmp_path: Path) -> None:
    _, model = configs("llama", tmp_path)
    counts = work_model(model)
    silent, one = work(counts, [(8, 8)], 0), work(counts, [(8, 8)], 1)
    assert one.num_flops - silent.num_flops == 2 * 64 * 260
    assert one.num_bytes - silent.num_bytes == counts.head_bytes == 4 * (64 + 64 * 260)


def test_smollm2_as_others_count_it(tmp_path: Path) -> None:
    """269 MB of weights; 54 GFLOP in all layers' linears of 256 tokens, attention comes on top."""
    _, model = configs("llama", tmp_path, **SMOLLM2)
    counts = work_model(model, "bfloat16")
    assert counts.weight_bytes == pytest.approx(269e6, rel=0.001)
    assert counts.kv_token_bytes == 23_040
    assert 256 * counts.token_flops == pytest.approx(54.4e9, rel=0.001)
    assert work(counts, [(1, 1)], 1).num_bytes == pytest.approx(269e6, rel=0.001)
    assert work(counts, [(256, 256)], 1).num_flops == pytest.approx(56.7e9, rel=0.001)


# -- as others count --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_transformers_has(tmp_path: Path, name: str, dtype: str) -> None:
    model_type, keys = MODELS[name]
    theirs, model = configs(model_type, tmp_path, **keys)
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(theirs, dtype=DTYPES[dtype])
    num_bytes = sum(p.numel() * p.element_size() for p in reference.parameters())
    if not theirs.tie_word_embeddings:  # then no more than rows of it are read
        num_bytes -= 260 * 64 * DTYPES[dtype].itemsize
    assert work_model(model, dtype).weight_bytes == num_bytes


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_torch_counts(tmp_path: Path, name: str) -> None:
    model_type, keys = MODELS[name]
    theirs, model = configs(model_type, tmp_path, **keys)
    reference = AutoModelForCausalLM.from_config(theirs, attn_implementation="eager")
    counts = work_model(model)
    for length in (1, 2, 9):
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            reference(torch.zeros(1, length, dtype=torch.int64))
        num_flops = {key: sum(n.values()) for key, n in counter.get_flop_counts().items()}
        # Some versions of transformers multiply matrices to find the angles of heads.
        angles = sum(n for key, n in num_flops.items() if key.endswith("rotary_emb"))
        num_masked = length * (length - 1) // 2  # pairs that are computed for nothing
        expected = num_flops["Global"] - angles - num_masked * counts.pair_flops
        assert work(counts, [(length, length)], length).num_flops == expected


def test_a_chunk_is_its_tokens(tmp_path: Path) -> None:
    """FLOPs of any batch of chunks are those of its tokens, one by one."""
    _, model = configs("llama", tmp_path)
    counts, rng = work_model(model), random.Random(0)
    for _ in range(50):
        starts = [rng.randrange(300) for _ in range(rng.randint(1, 8))]
        chunks = [(n, start + n) for start in starts if (n := rng.randint(1, 100))]
        singles = [(1, end - i) for n, end in chunks for i in range(n)]
        assert work(counts, chunks, 3).num_flops == work(counts, singles, 3).num_flops


# -- summing up -------------------------------------------------------------------------------


def test_a_meter_sums_until_it_is_asked() -> None:
    meter = StepMeter()
    for _ in range(2):
        with meter.during("forward"):
            pass
        meter.did(StepWork(3, 5))
    with pytest.raises(ZeroDivisionError), meter.during("sample"):
        1 / 0  # noqa: B018
    spent = meter.take()
    assert spent.work == StepWork(6, 10)
    assert spent.prepare_s == 0 and spent.forward_s > 0 and spent.sample_s > 0
    again = meter.take()
    assert (again.work, again.forward_s, again.sample_s) == (StepWork(), 0, 0)


def test_the_meter_goes_by_the_device() -> None:
    """Also on a machine without a GPU: making one touches no driver."""
    assert type(meter_for(torch.device("cpu"))) is StepMeter
    assert type(meter_for(torch.device("cuda"))) is CudaStepMeter
    assert type(meter_for(torch.device("cuda", 3))) is CudaStepMeter


class Gpu:
    """Stands for torch.cuda where there is none: events that happen when they are awaited."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.ranges: list[str] = []
        self.log: list[str] = []
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.at_ms = float("nan")

            def record(self, stream: str) -> None:
                self.at_ms = gpu.now_ms
                gpu.log.append(f"record on {stream} in {gpu.ranges}")

            def synchronize(self) -> None:
                gpu.log.append("synchronize")

            def elapsed_time(self, end: Event) -> float:
                return end.at_ms - self.at_ms

        @contextmanager
        def range_of(name: str) -> Iterator[None]:
            self.ranges.append(name)
            yield
            self.ranges.pop()

        self.Event = Event
        self.nvtx = SimpleNamespace(range=range_of)

    def current_stream(self, device: torch.device) -> str:
        return f"{device}'s stream"


def test_a_cuda_meter_reads_its_events_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    monkeypatch.setattr(torch, "cuda", gpu)
    meter = meter_for(torch.device("cuda", 1))
    for forward_ms in (500, 250):
        with meter.during("forward"):
            gpu.now_ms += forward_ms
        meter.did(StepWork(3, 5))
    with pytest.raises(ZeroDivisionError), meter.during("sample"):
        gpu.now_ms += 125
        1 / 0  # noqa: B018
    assert "synchronize" not in gpu.log
    assert set(gpu.log) == {f"record on cuda:1's stream in ['{p}']" for p in ("forward", "sample")}
    assert meter.take() == StepSpent(0.0, 0.75, 0.125, StepWork(6, 10))
    assert meter.take() == StepSpent()
