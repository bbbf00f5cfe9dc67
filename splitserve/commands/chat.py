"""`splitserve chat`: talk to the model of a running cluster."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from splitserve.commands.errors import show_error
from splitserve.commands.options import API_KEY, BASE_URL
from splitserve.errors import InvalidRequestError, SplitserveError

if TYPE_CHECKING:
    from splitserve.client import Client, Stream

_START_ANEW = "/new"


def chat(
    base_url: str = BASE_URL,
    api_key: str | None = API_KEY,
    system: str | None = typer.Option(None, help="What the model is told before anything else."),
    temperature: float = typer.Option(
        0.2, min=0.0, help="0: the likeliest token each time; higher: more varied."
    ),
    max_tokens: int = typer.Option(512, min=1, help="Longest answer, in tokens."),
) -> None:
    """Talk to the model in the terminal. Ctrl-C cuts an answer, Ctrl-D ends.

    Lines from a pipe are answered one after the other, with nothing but the answers on stdout.
    """
    from splitserve.client import Client

    interactive = sys.stdin.isatty()
    console = Console(highlight=False)
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    options = {"temperature": temperature, "max_tokens": max_tokens}
    with Client(base_url, api_key) as client:
        if interactive:
            _greet(console, client)
        while (line := _ask(console, interactive)) is not None:
            if interactive and line == _START_ANEW:
                messages = list(start)
                continue
            try:
                _take_turn(client, messages, line, options)
            except SplitserveError as error:
                if not interactive:
                    raise
                show_error(error)
                console.print(f"[dim]that message is dropped; {_START_ANEW} starts anew[/dim]")


def _greet(console: Console, client: Client) -> None:
    console.print(
        f"[dim]{client.model} at {client.base_url}; "
        f"Ctrl-C cuts an answer, {_START_ANEW} forgets the conversation, Ctrl-D ends[/dim]",
        soft_wrap=True,
    )


def _ask(console: Console, interactive: bool) -> str | None:
    """The user's next line; None at the end of input."""
    while True:
        try:
            line = (console.input("[bold]> [/bold]") if interactive else input()).strip()
        except (EOFError, KeyboardInterrupt):
            if interactive:
                console.print()
            return None
        if line:
            return line


def _take_turn(
    client: Client, messages: list[dict[str, str]], line: str, options: dict[str, Any]
) -> None:
    """Answer `line`, and remember both. An error leaves the conversation as it was."""
    asked = [*messages, {"role": "user", "content": line}]
    answer = _answer(client, asked, options)
    messages[:] = [*asked, {"role": "assistant", "content": answer}]


def _answer(client: Client, messages: list[dict[str, str]], options: dict[str, Any]) -> str:
    parts: list[str] = []
    try:
        with _stream(client, messages, options) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
                parts.append(chunk.text)
    except KeyboardInterrupt:
        print(" [cut]", end="")
    finally:
        print(flush=True)
    return "".join(parts)


def _stream(client: Client, messages: list[dict[str, str]], options: dict[str, Any]) -> Stream:
    """Where less than `max_tokens` is left of the context, the answer may fill the rest of it."""
    try:
        return client.chat(messages, stream=True, **options)
    except InvalidRequestError as error:
        if error.param != "max_tokens":
            raise
    rest = {key: value for key, value in options.items() if key != "max_tokens"}
    return client.chat(messages, stream=True, **rest)
