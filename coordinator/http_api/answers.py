"""Collecting an answer, and streaming one: what completions and chat have in common."""

from __future__ import annotations

import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request, Response

from coordinator.http_api.clients import ClientGoneError, EventStream, unless_gone
from coordinator.http_api.errors import JsonResponse, dump, error_body
from coordinator.http_api.prompts import Prompt
from coordinator.http_api.schemas import Generation
from coordinator.output import OutputToken, Piece
from coordinator.service import Order, Service
from coordinator.tickets import Call, Ended
from splitserve.errors import InvalidRequestError, RequestFailedError, SplitserveError
from splitserve.timeline import Timeline

CLIENT_CLOSED_REQUEST = 499  # nobody sees it but an access log

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ChoiceText:
    """What one choice has come to: all of it, or what is not streamed yet."""

    texts: list[str] = field(default_factory=list)
    tokens: list[OutputToken] = field(default_factory=list)
    finish: str | None = None

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.tokens += piece.tokens
        self.finish = piece.finish

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def token_ids(self) -> list[int]:
        return [one.token.token_id for one in self.tokens]


class Format(ABC):
    """One of the two APIs: how its answers and chunks look."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def __init__(self, service: Service, body: Generation, prompts: Sequence[Prompt]) -> None:
        self.service = service
        self.body = body
        self.prompts = prompts
        self.num_choices = body.n or 1  # of each prompt
        self._id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = body.model or service.config.served_model_names[0]

    @abstractmethod
    def choice(self, index: int, text: ChoiceText) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def chunk_choice(self, index: int, text: ChoiceText, is_first: bool) -> dict[str, Any]:
        """A part of a choice."""

    def prompt_ids(self) -> dict[str, Any]:
        """What goes to the top of an answer, or of the first chunk."""
        return {}

    def head(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
        }

    def prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.num_choices]

    def usage(self, call: Call) -> dict[str, Any]:
        """Prompts once each, answers of all choices."""
        prompt = sum(len(one.token_ids) for one in self.prompts)
        completion = sum(ticket.num_output_tokens for ticket in call.tickets)
        cached = sum(ticket.num_cached_tokens for ticket in call.tickets)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def timing(self, timelines: dict[int, Timeline]) -> dict[str, Any]:
        """An object for one prompt; a list of them, in order, for several."""
        if not self.body.return_timing:
            return {}
        reports = [timelines[position].report() for position in sorted(timelines)]
        return {"timing": reports[0] if len(self.prompts) == 1 else reports}


def check_stream_options(body: Generation) -> None:
    """Raises InvalidRequestError for stream_options without stream."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream: true", param="stream_options")


async def answer(request: Request, answer_format: Format, orders: Sequence[Order]) -> Response:
    """Run the orders and answer, in one piece or as a stream.

    What fails before the first token is an HTTP error; afterwards a stream has an error event and
    no end marker. A client that hangs up cancels everything it asked for.
    """
    service = answer_format.service
    call = service.submit(orders, request.state.received_at)
    handed_on = False
    try:
        if not answer_format.body.stream:
            return JsonResponse(await unless_gone(request.receive, _collect(answer_format, call)))
        first = await unless_gone(request.receive, call.next())
        events = _Events(answer_format, call).run(first)
        handed_on = True
        return EventStream(events, on_close=lambda: service.give_back(call))
    except ClientGoneError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        if not handed_on:
            service.give_back(call)


async def _collect(answer_format: Format, call: Call) -> dict[str, Any]:
    num_choices = answer_format.num_choices
    choices = [ChoiceText() for _ in range(num_choices * len(call.tickets))]
    timelines: dict[int, Timeline] = {}
    while len(timelines) < len(call.tickets):
        for position, news in await call.next():
            if isinstance(news, Ended):
                timelines[position] = news.timeline
            else:
                choices[position * num_choices + news.choice_id].add(news)
    return {
        **answer_format.head(answer_format.object_name),
        "choices": [answer_format.choice(i, text) for i, text in enumerate(choices)],
        "usage": answer_format.usage(call),
        **answer_format.prompt_ids(),
        **answer_format.timing(timelines),
    }


class _Events:
    """Owns one stream: which choices have begun, and what is held back of each."""

    def __init__(self, answer_format: Format, call: Call) -> None:
        self._format = answer_format
        self._call = call
        self._pending: dict[int, ChoiceText] = {}
        self._begun: set[int] = set()
        self._unsent: set[int] = set()  # positions of prompts whose first bytes are being sent
        self._timelines: dict[int, Timeline] = {}
        options = answer_format.body.stream_options
        self._wants_usage = bool(options and options.include_usage)

    async def run(self, news: list[tuple[int, Piece | Ended]]) -> AsyncIterator[bytes]:
        """The stream's bytes, from the first news on."""
        try:
            while True:
                events = [self._take(*one) for one in news]
                if any(events):
                    yield b"".join(events)
                    self._sent()
                if len(self._timelines) == len(self._call.tickets):
                    break
                news = await self._call.next()
            last = self._last()
            self._format.service.answered(self._call)  # before the client knows that it has all
            yield last + b"data: [DONE]\n\n"
        except SplitserveError as error:
            yield event(error_body(error))
        except Exception:
            log.exception("a stream failed")
            yield event(error_body(RequestFailedError("internal error")))

    def _take(self, position: int, news: Piece | Ended) -> bytes:
        if isinstance(news, Ended):
            self._timelines[position] = news.timeline
            return b""
        index = position * self._format.num_choices + news.choice_id
        pending = self._pending.setdefault(index, ChoiceText())
        pending.add(news)
        # Tokens wait for the text they belong to, unless somebody wants the tokens themselves.
        if not (pending.text or pending.finish or self._format.body.return_token_ids):
            return b""
        return self._chunk(index, self._pending.pop(index))

    def _chunk(self, index: int, text: ChoiceText) -> bytes:
        chunk = self._format.head(self._format.chunk_object_name)
        if not self._begun:
            chunk |= self._format.prompt_ids()
        is_first = index not in self._begun
        if is_first:
            self._begin(index)
        chunk["choices"] = [self._format.chunk_choice(index, text, is_first)]
        if self._wants_usage:
            chunk["usage"] = None
        return event(chunk)

    def _begin(self, index: int) -> None:
        """The first chunk of a choice; perhaps of its prompt."""
        self._begun.add(index)
        position = index // self._format.num_choices
        if self._call.tickets[position].first_sent_at is None:
            self._unsent.add(position)

    def _sent(self) -> None:
        if self._unsent:
            now = time.monotonic()
            for position in self._unsent:
                self._call.tickets[position].sent(now)
            self._unsent.clear()

    def _last(self) -> bytes:
        """A chunk without choices, for those who asked for usage or timing."""
        extra = self._format.timing(self._timelines)
        if self._wants_usage:
            extra["usage"] = self._format.usage(self._call)
        if not extra:
            return b""
        head = self._format.head(self._format.chunk_object_name)
        return event({**head, "choices": [], **extra})


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dump(content) + b"\n\n"
