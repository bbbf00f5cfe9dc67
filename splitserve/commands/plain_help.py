"""`--help` as plain text: names are never cut, so it can be piped into grep."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from splitserve.commands.options import PANEL_NOTES

_ARGUMENTS = "Arguments"
_OPTIONS = "Options"


class PlainCommand(TyperCommand):
    """A command whose help lists the options under the headings they were given."""

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        sections: dict[str, list[tuple[str, str]]] = {_ARGUMENTS: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(_heading(parameter), []).append(record)
        for heading, records in sections.items():
            if not records:
                continue
            with formatter.section(heading):
                if heading in PANEL_NOTES:
                    formatter.write_text(PANEL_NOTES[heading])
                    formatter.write_paragraph()
                formatter.write_dl(records)


def _heading(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return _ARGUMENTS
    return getattr(parameter, "rich_help_panel", None) or _OPTIONS
