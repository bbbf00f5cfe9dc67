"""Hypothesis strategies for every message, made from its type hints."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from splitserve.wire import messages as m

UNIONS: dict[str, Any] = {
    "ToWorker": m.ToWorker,
    "ToCoordinator": m.ToCoordinator,
    "ToLauncher": m.ToLauncher,
    "PrefillToDecode": m.PrefillToDecode,
    "DecodeToPrefill": m.DecodeToPrefill,
}
KINDS = [(union, kind) for union in UNIONS.values() for kind in get_args(union)]
_INTS = {
    "checksum": st.integers(0, 2**64 - 1),
    "exit_code": st.integers(-(2**31), 2**31 - 1),
}


def messages_of(kind: type) -> st.SearchStrategy[Any]:
    """Any instance of a message or of a part of one."""
    hints = get_type_hints(kind)
    return st.builds(
        kind, **{f.name: _strategy(hints[f.name], f.name) for f in dataclasses.fields(kind)}
    )


def _strategy(hint: Any, name: str) -> st.SearchStrategy[Any]:
    origin = get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        inner = next(arg for arg in get_args(hint) if arg is not type(None))
        return st.none() | _strategy(inner, name)
    if origin is Literal:
        return st.sampled_from(get_args(hint))
    if origin is tuple:
        return _tuples(get_args(hint), name)
    if dataclasses.is_dataclass(hint):
        return messages_of(typing.cast(type, hint))
    scalars: dict[Any, st.SearchStrategy[Any]] = {
        int: _INTS.get(name, st.integers(0, 2**63 - 1)),
        str: st.text(max_size=12),
        float: st.floats(-1e18, 1e18),
        bool: st.booleans(),
    }
    return scalars[hint]


def _tuples(args: tuple[Any, ...], name: str) -> st.SearchStrategy[Any]:
    if args[-1] is Ellipsis:
        return st.lists(_strategy(args[0], name), max_size=4).map(tuple)
    return st.tuples(*(_strategy(arg, name) for arg in args))
