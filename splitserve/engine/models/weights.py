"""Weights out of one or many safetensors files, by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from splitserve.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_CPU = torch.device("cpu")


class Weights:
    """The tensors of one checkpoint, each read when it is asked for, in one dtype."""

    def __init__(self, files: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self._files = files  # tensor name → open file
        self._dtype, self._device = dtype, device

    def get(self, name: str, *shape: int) -> Tensor:
        """The tensor, in memory of its own. ConfigError if it isn't there or has another shape."""
        if name not in self._files:
            raise ConfigError(f"the checkpoint has no tensor {name!r}")
        tensor: Tensor = self._files[name].get_tensor(name)
        if tensor.shape != shape:
            raise ConfigError(
                f"tensor {name!r} is {tuple(tensor.shape)}; config.json makes it {shape}"
            )
        return tensor.to(self._device, self._dtype, copy=True)


@contextmanager
def open_weights(
    directory: Path, dtype: torch.dtype, device: torch.device = _CPU
) -> Iterator[Weights]:
    """The weights of a Hugging Face directory, read to the device.

    ConfigError when they are missing or broken.
    """
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in _paths(directory):
            try:
                opened = stack.enter_context(safe_open(path, "pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path}: {error}") from error
            files.update(dict.fromkeys(opened.keys(), opened))
        yield Weights(files, dtype, device)


def _paths(directory: Path) -> list[Path]:
    """The files the index names; without an index, every safetensors file."""
    index = directory / _INDEX
    if not index.exists():
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise ConfigError(f"{directory} holds no safetensors file")
        return paths
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index}: {error}") from error
    return [directory / name for name in sorted(names)]
