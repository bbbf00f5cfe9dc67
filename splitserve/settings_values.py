"""Raw values of flags, variables and files, made into typed ones; and nearest-name hints."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from splitserve.errors import ConfigError
from splitserve.flags import Flag

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_WORDS = {"true": True, "1": True, "yes": True, "on": True} | {
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


def closest(name: str, known: Iterable[str]) -> str:
    """A hint to append to "unknown ...": the most similar known name, or nothing."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def convert(flag: Flag, raw: Any, where: str) -> Any:
    """`raw` as the flag's kind, checked. Raises ConfigError saying where it was set."""
    try:
        value = _READERS[flag.kind](raw)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: expected {_EXPECTED[flag.kind]}, got {raw!r}") from error
    if flag.choices and value not in flag.choices:
        hint = closest(str(value), flag.choices)
        raise ConfigError(f"{where}: {value!r} is none of {', '.join(flag.choices)}{hint}")
    if flag.low is not None and value < flag.low:
        raise ConfigError(f"{where}: {value} is below the least value {flag.low:g}")
    if flag.high is not None and value > flag.high:
        raise ConfigError(f"{where}: {value} is above the greatest value {flag.high:g}")
    return value


def _read_int(raw: Any) -> int:
    if isinstance(raw, bool) or (isinstance(raw, float) and not raw.is_integer()):
        raise ValueError
    return int(raw)


def _read_float(raw: Any) -> float:
    if isinstance(raw, bool) or not math.isfinite(float(raw)):
        raise ValueError
    return float(raw)


def _read_bytes(raw: Any) -> int:
    if not isinstance(raw, str):
        return _read_int(raw)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", raw.strip().lower())
    if match is None:
        raise ValueError
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _read_bool(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    return _WORDS[raw.strip().lower()] if raw.strip().lower() in _WORDS else _refuse()


def _refuse() -> bool:
    raise ValueError


def _read_str(raw: Any) -> str:
    if isinstance(raw, bool) or not isinstance(raw, str | int | float) or str(raw).strip() == "":
        raise ValueError
    return str(raw)


def _read_strs(raw: Any) -> tuple[str, ...]:
    parts = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(parts, Sequence):
        raise TypeError
    return tuple(_read_str(part) for part in parts)


def _read_devices(raw: Any) -> tuple[int, ...]:
    parts = raw.split(",") if isinstance(raw, str) else [raw] if isinstance(raw, int) else raw
    devices = tuple(_read_int(part) for part in parts)
    if min(devices) < 0:
        raise ValueError
    return devices


def _read_map(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, Mapping) or not all(isinstance(key, str) for key in raw):
        raise ValueError
    return dict(raw)


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "int": _read_int,
    "float": _read_float,
    "bytes": _read_bytes,
    "str": _read_str,
    "bool": _read_bool,
    "strs": _read_strs,
    "devices": _read_devices,
    "map": _read_map,
}
_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bytes": "a number of bytes, such as 1073741824 or 512MiB",
    "str": "a text",
    "bool": "true or false",
    "strs": "a list of texts",
    "devices": "GPU numbers, such as 0 or 1,2",
    "map": "a mapping from names to values",
}


def flatten(
    file: Mapping[str, Any], known: Mapping[tuple[str, ...], Flag]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value) of every leaf of a config file; a section is a mapping of its keys.

    A pool may be given as its number of workers alone: `prefill: 2`.
    """
    sections = {path[0] for path in known if len(path) > 1}
    for key, value in file.items():
        if key not in sections:
            yield (str(key),), value
        elif isinstance(value, Mapping):
            yield from (((key, str(inner)), item) for inner, item in value.items())
        elif (key, "num_workers") in known:
            yield (key, "num_workers"), value
        else:
            raise ConfigError(f"{key} (config file): expected a mapping of settings, got {value!r}")


def nest(leaves: Iterable[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """The inverse of `flatten`; unset leaves are left out."""
    tree: dict[str, Any] = {}
    for path, value in leaves:
        if value is None:
            continue
        if len(path) == 1:
            tree[path[0]] = value
        else:
            tree.setdefault(path[0], {})[path[1]] = value
    return tree
