"""Command-line options made from the table of flags, so that `--help` and the table agree."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import typer

from splitserve.flags import ENGINE_KEYS, Flag, all_flags

_TYPES: dict[str, Any] = {
    "int": int | None,
    "float": float | None,
    "bool": bool | None,
    "strs": list[str] | None,
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
        metavar="|".join(flag.choices) or None,
        rich_help_panel=_panel(flag),
    )
    return inspect.Parameter(
        flag.key,
        inspect.Parameter.KEYWORD_ONLY,
        default=option,
        annotation=_TYPES.get(flag.kind, str | None),
    )


def _help(flag: Flag) -> str:
    default = "" if flag.default is None else f" Default: {flag.default}."
    return flag.help + default


def _panel(flag: Flag) -> str:
    if (
        flag.path[0] in ("prefill", "decode")
        and len(flag.path) > 1
        and flag.path[1] != "num_workers"
    ):
        return f"The {flag.path[0]} pool alone"
    if flag.key in ENGINE_KEYS:
        return "How a worker computes"
    return "Ray (splitserve up)" if flag.path[0] == "ray" else "Serving"
