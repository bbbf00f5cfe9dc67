"""Kernels against their references, interpreted, and compiled for GPUs that are not here."""

from __future__ import annotations

from pathlib import Path

from tests.kernels.children import needs_triton, run_compiled, run_interpreted


@needs_triton
def test_kernels_equal_their_references() -> None:
    run_interpreted("test_attention.py", "test_kv.py", "test_layers.py")


@needs_triton
def test_the_gpu_step_equals_the_models_of_transformers() -> None:
    run_interpreted("test_model.py", "test_kv_cache.py")


@needs_triton
def test_kernels_compile_without_a_gpu(tmp_path: Path) -> None:
    run_compiled(tmp_path)
