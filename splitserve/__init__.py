"""splitserve: a disaggregated prefill/decode serving cluster for language models.

Importing this package loads neither torch nor ZeroMQ nor an HTTP client: the public names are
looked up when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitserve.client import AsyncClient, Client
    from splitserve.cluster import Cluster
    from splitserve.request import SamplingParams

__version__ = "0.1.0"

__all__ = ["AsyncClient", "Client", "Cluster", "SamplingParams", "__version__"]

_HOMES = {
    "AsyncClient": "splitserve.client",
    "Client": "splitserve.client",
    "Cluster": "splitserve.cluster",
    "SamplingParams": "splitserve.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'splitserve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
