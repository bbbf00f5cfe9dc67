"""The compiled decoder: near to f32, and the same to the bit however its work is cut."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from splitserve.engine.batch import Chunk
from splitserve.engine.cpu.decoder import STAGES, CpuDecoder
from splitserve.engine.model_runner import ModelRunner
from splitserve.errors import ConfigError
from splitserve.wire.messages import Region
from tests.tiny_models import make_tiny_model
from tests.unit.engine.conftest import LoadRunner, expected_logits
from tests.unit.engine.sequences import Prompts, chunk

pytestmark = pytest.mark.skipif(
    not torch.cpu.get_capabilities().get("avx512_bf16", False),
    reason="this CPU does not multiply bfloat16 (AVX-512 BF16)",
)

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied embeddings": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2, biases of queries, keys and values": ("qwen2", {}),
    "qwen3, norms of heads": ("qwen3", {}),
    "sizes that fill no panel": ("llama", {"hidden_size": 72, "intermediate_size": 100}),
    "odd sizes": (
        "llama",
        {
            "hidden_size": 65,
            "intermediate_size": 99,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
        },
    ),
    "one query head a KV head": ("llama", {"num_key_value_heads": 4}),
    "three": ("llama", {"num_attention_heads": 6, "hidden_size": 96}),
    "four": ("llama", {"num_key_value_heads": 1}),
    "eight": ("llama", {"num_attention_heads": 16}),
    "heads of 8": ("llama", {"head_dim": 8}),
    "heads of 80": ("llama", {"head_dim": 80}),
    "heads of 128": ("llama", {"head_dim": 128}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_no_further_from_f32_than_torch_is(name: str, tmp_path: Path, load: LoadRunner) -> None:
    family, keys = SHAPES[name]
    directory = make_tiny_model(family, tmp_path, dtype=torch.bfloat16, **keys)
    prompts = Prompts(96)
    token_ids = prompts.token_ids(200)
    blocks = prompts.blocks(200)
    exact = expected_logits(directory, token_ids)

    def error(backend: str) -> float:
        runner = compiled(load, directory) if backend == "cpu" else torch_only(load, directory)
        return float((everywhere(runner, token_ids, [1] * 200, blocks) - exact).abs().mean())

    assert error("cpu") < 1.1 * error("torch")


@pytest.mark.parametrize("changes", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("name", ["llama", "biases", "sizes that fill no panel", "heads of 80"])
def test_int8_is_near(name: str, changes: dict[str, str], tmp_path: Path, load: LoadRunner) -> None:
    """Each number of a row, or of a head's keys and values, is off by at most 1/254 of the largest
    one: some percent of the logits' spread, and never as much as noise would be."""
    family, keys = SHAPES[name]
    directory = make_tiny_model(family, tmp_path, **keys)
    prompts = Prompts(96)
    token_ids, blocks = prompts.token_ids(200), prompts.blocks(200)
    exact = expected_logits(directory, token_ids)
    logits = everywhere(compiled(load, directory, **changes), token_ids, [1] * 200, blocks)
    plain = everywhere(compiled(load, directory), token_ids, [1] * 200, blocks)
    assert not torch.equal(logits, plain), "nothing was rounded"
    assert (logits - exact).abs().mean() < 0.05 * exact.std()


@pytest.mark.parametrize("key", ["quantization", "kv_cache_dtype"])
def test_int8_needs_the_compiled_decoder(tiny_llama: Path, load: LoadRunner, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} int8 needs dtype bfloat16; it is float32"):
        load(tiny_llama, dtype="float32", **{key: "int8"})
    with pytest.raises(ConfigError, match=f"{key} int8 needs attention_backend cpu"):
        load(tiny_llama, dtype="bfloat16", attention_backend="reference", **{key: "int8"})


def test_int8_kv_takes_its_bytes_to_another_runner(tiny_llama: Path, load: LoadRunner) -> None:
    here, there = (compiled(load, tiny_llama, kv_cache_dtype="int8") for _ in range(2))
    layout = here.layout
    assert layout.token_bytes == layout.num_layers * 2 * layout.num_kv_heads * (32 + 4)
    prompts = Prompts(96)
    token_ids = prompts.token_ids(40)
    source, target = prompts.blocks(40), prompts.blocks(40)
    expected = everywhere(here, token_ids, [39, 1], source)[1]
    region = Region(0, layout.num_layers, 0, 39, 0, layout.num_kv_heads)
    there.kv_cache.write(target, region, here.kv_cache.read(source, region))
    assert torch.equal(there.logits([chunk(token_ids, 39, 40, target)])[0], expected)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("name", ["llama", "eight", "heads of 80"])
def test_a_token_is_the_same_however_its_prompt_is_cut(
    name: str, kv_cache_dtype: str, tmp_path: Path, load: LoadRunner
) -> None:
    family, keys = SHAPES[name]
    directory = make_tiny_model(family, tmp_path, **keys)
    prompts = Prompts(96)
    token_ids, blocks = prompts.token_ids(300), prompts.blocks(300)
    expected: tuple[Tensor, Tensor] | None = None
    for sizes in ([1] * 300, [7, 100, 2, 19, 127, 45], [129, 171], [16] * 18 + [12]):
        num_threads = 1 + len(sizes) % 3
        runner = compiled(load, directory, num_threads=num_threads, kv_cache_dtype=kv_cache_dtype)
        logits = everywhere(runner, token_ids, sizes, blocks)
        kept = runner.kv_cache.tensor.clone()
        ends = torch.tensor(sizes).cumsum(0) - 1
        if expected is None:
            expected = logits, kept
        assert torch.equal(logits, expected[0][ends]) and torch.equal(kept, expected[1])


def test_a_row_is_the_same_beside_any_others(tiny_llama: Path, load: LoadRunner) -> None:
    runner = compiled(load, tiny_llama, num_threads=2)
    prompts = Prompts(96)
    lengths = [1, 15, 16, 17, 128, 129, 260]
    batch = [(prompts.token_ids(n), prompts.blocks(n)) for n in lengths]
    together = runner.logits([chunk(ids, 0, len(ids), blocks) for ids, blocks in batch])
    decoded = runner.logits([chunk(ids, len(ids) - 1, len(ids), blocks) for ids, blocks in batch])
    for i, (ids, blocks) in enumerate(batch):
        alone = runner.logits([chunk(ids, 0, len(ids), blocks)])[0]
        assert torch.equal(together[i], alone) and torch.equal(decoded[i], alone)


def test_memory_is_written_before_it_is_read(tmp_path: Path, load: LoadRunner) -> None:
    """Products take numbers in pairs: behind an odd row stands a zero."""
    family, keys = SHAPES["odd sizes"]
    runner = compiled(load, make_tiny_model(family, tmp_path, **keys))
    prompts = Prompts(96)
    token_ids, blocks = prompts.token_ids(40), prompts.blocks(40)
    expected = everywhere(runner, token_ids, [39, 1], blocks)
    assert isinstance(runner._decoder, CpuDecoder)
    runner._decoder._memory.numpy().fill(255)  # as numbers: none
    assert torch.equal(everywhere(runner, token_ids, [39, 1], blocks), expected)


@pytest.mark.parametrize("token_id", [-1, 260, 10**8])
def test_a_token_id_is_no_place_in_memory(
    tiny_llama: Path, load: LoadRunner, token_id: int
) -> None:
    runner = compiled(load, tiny_llama)
    with pytest.raises(IndexError, match=f"token id {token_id} is not in 0 to 259"):
        runner.logits([chunk([1, token_id, 2], 0, 3, [0])])


def test_a_position_behind_the_longest_context_is_refused(
    tiny_llama: Path, load: LoadRunner
) -> None:
    runner = compiled(load, tiny_llama, max_model_len=20)
    with pytest.raises(IndexError, match="position 20 is not in 0 to 19"):
        runner.logits([chunk([1] * 21, 0, 21, [0, 1])])


def test_int8_kv_hides_no_broken_number(tmp_path: Path, load: LoadRunner) -> None:
    directory = make_tiny_model("llama", tmp_path, attention_bias=True)
    name = "model.layers.1.self_attn.k_proj.bias"
    path = directory / "model.safetensors"
    weights = load_file(path)
    weights[name][3] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})
    runner = compiled(load, directory, kv_cache_dtype="int8")
    assert everywhere(runner, [1, 2, 3], [3], [0]).isnan().all()


def test_what_lies_behind_a_context_is_never_read(tiny_llama: Path, load: LoadRunner) -> None:
    """Freed blocks keep what others computed, which may be anything."""
    prompts = Prompts(96)
    token_ids, blocks = prompts.token_ids(133), prompts.blocks(133)
    clean, dirty = compiled(load, tiny_llama), compiled(load, tiny_llama)
    dirty.kv_cache.tensor.fill_(torch.nan)
    expected = everywhere(clean, token_ids, [50, 80, 1, 2], blocks)
    assert torch.equal(everywhere(dirty, token_ids, [50, 80, 1, 2], blocks), expected)


def test_only_asked_for_rows_have_logits(tiny_llama: Path, load: LoadRunner) -> None:
    runner = compiled(load, tiny_llama)
    prompts = Prompts(96)
    token_ids, blocks = prompts.token_ids(20), prompts.blocks(20)
    assert runner.logits([Chunk(token_ids, 0, 10, blocks)]).shape == (0, runner.vocab_size)
    assert runner.logits([chunk(token_ids, 10, 20, blocks)]).shape == (1, runner.vocab_size)


def test_a_watched_step_tells_its_stages(tiny_llama: Path, load: LoadRunner) -> None:
    runner = compiled(load, tiny_llama)
    prompts = Prompts(96)
    token_ids, blocks = prompts.token_ids(20), prompts.blocks(20)
    for samples, last in ((True, "LM head"), (False, "down linear")):
        runner.trace_next(1)
        part = chunk(token_ids, 0, 20, blocks)
        runner.step([part if samples else Chunk(token_ids, 0, 20, blocks)])
        stages = [op for op in runner.take_kernels()[0] if op.name in STAGES]
        assert [op.name for op in stages[:4]] == list(STAGES[:4])
        assert stages[-1].name == last
        assert [op.name for op in stages].count("attention") == 2  # layers
        for earlier, later in itertools.pairwise(stages):
            assert later.started_at == pytest.approx(earlier.started_at + earlier.duration_s)


def test_heads_it_has_no_code_for_are_computed_by_torch(tmp_path: Path, load: LoadRunner) -> None:
    runner = load(make_tiny_model("llama", tmp_path, head_dim=20), dtype="bfloat16")
    assert not isinstance(runner._decoder, CpuDecoder)


def test_without_a_compiler_torch_computes(
    tiny_llama: Path, load: LoadRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    runner = load(tiny_llama, dtype="bfloat16")
    assert not isinstance(runner._decoder, CpuDecoder)
    prompts = Prompts(96)
    token_ids, blocks = prompts.token_ids(20), prompts.blocks(20)
    assert runner.logits([chunk(token_ids, 0, 20, blocks)]).isfinite().all()


def compiled(load: LoadRunner, directory: Path, **changes: object) -> ModelRunner:
    runner = load(directory, dtype="bfloat16", **changes)
    assert isinstance(runner._decoder, CpuDecoder)
    return runner


def torch_only(load: LoadRunner, directory: Path) -> ModelRunner:
    return load(directory, dtype="bfloat16", attention_backend="reference")


def everywhere(
    runner: ModelRunner, token_ids: list[int], sizes: list[int], blocks: list[int]
) -> Tensor:
    """Logits at the end of every chunk, [len(sizes), vocab], in f32."""
    start, rows = 0, []
    for size in sizes:
        rows.append(runner.logits([chunk(token_ids, start, start + size, blocks)])[0].float())
        start += size
    return torch.stack(rows)
