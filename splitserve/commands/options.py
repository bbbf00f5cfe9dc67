"""Command-line options made from the table of flags, so that `--help` and the table agree."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import typer

from splitserve.config import ROLES
from splitserve.flags import ENGINE_KEYS, Flag, all_flags
from splitserve.settings import NOT_BUILT

# What the parser makes of a value. All else stays text: the table's own reader converts it, and
# says what is wrong with it in the same words as for a variable or a file.
_TYPES: dict[str, Any] = {"bool": bool | None, "strs": list[str] | None}
_METAVARS = {
    "int": "INTEGER",
    "float": "NUMBER",
    "bytes": "BYTES",
    "devices": "GPUS",
    "str": "TEXT",
    "strs": "TEXT",
}
_ENGINE_PANEL = "How a worker computes"
# What `--help` says under a heading before its options.
PANEL_NOTES = {
    _ENGINE_PANEL: "Each of these also exists for one pool alone, as --prefill-... and "
    "--decode-..., for example --decode-max-num-seqs."
}

BASE_URL = typer.Option(
    "http://127.0.0.1:8000", envvar="SPLITSERVE_BASE_URL", help="Where the cluster listens."
)
API_KEY = typer.Option(None, envvar="SPLITSERVE_API_KEY", help="The key it asks for, if any.")


def with_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Give `function(..., **given)` one option for each flag; what was not given is None."""
    signature = inspect.signature(function, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    flags = [flag for flag in all_flags().values() if not flag.file_only]
    parameters = [*own, *(_parameter(flag) for flag in flags)]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    return function


def _parameter(flag: Flag) -> inspect.Parameter:
    names = flag.option
    if flag.kind == "bool":
        names = f"{flag.option}/--no-{flag.option.removeprefix('--')}"
    option = typer.Option(
        None,
        names,
        help=_help(flag),
        metavar="|".join(_built(flag)) or _METAVARS.get(flag.kind),
        hidden=is_of_one_pool(flag),
        rich_help_panel=_ENGINE_PANEL if flag.key in ENGINE_KEYS else _panel(flag),
    )
    return inspect.Parameter(
        flag.key,
        inspect.Parameter.KEYWORD_ONLY,
        default=option,
        annotation=_TYPES.get(flag.kind, str | None),
    )


def is_of_one_pool(flag: Flag) -> bool:
    """Whether it repeats an engine flag for one pool: those work, but help names them once."""
    return any(flag.key == f"{role}_{key}" for role in ROLES for key in ENGINE_KEYS)


def _built(flag: Flag) -> tuple[str, ...]:
    missing = NOT_BUILT.get(flag.key, ())
    return tuple(choice for choice in flag.choices if choice not in missing)


def _help(flag: Flag) -> str:
    parts = [flag.help]
    if missing := [choice for choice in flag.choices if choice not in _built(flag)]:
        parts.append(f"Not built yet: {', '.join(missing)}.")
    if flag.default is not None:
        parts.append(f"Default: {flag.default}.")
    return " ".join(parts)


def _panel(flag: Flag) -> str:
    return "Ray (splitserve up)" if flag.path[0] == "ray" else "Serving"
