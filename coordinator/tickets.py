"""What a waiting client holds: a ticket, on which its answer arrives piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.events import ChoiceStopped, Deliver, Event, Fail, Finish, RequestCancelled
from coordinator.output import ChoiceOutput, Piece
from splitserve.errors import SplitserveError
from splitserve.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Ended:
    """Every choice of one prompt is complete."""

    timeline: Timeline


News = Piece | Ended | SplitserveError


@dataclass(slots=True, eq=False)
class Ticket:
    """One prompt's answer on its way to a client. `position` is the prompt's, within its call."""

    request_id: str
    position: int
    outputs: dict[int, ChoiceOutput]
    news: asyncio.Queue[tuple[int, News]]
    first_sent_at: float | None = None
    timeline: Timeline | None = None  # finished, and not yet counted
    num_cached_tokens: int = 0  # of the prompt

    @property
    def num_output_tokens(self) -> int:
        """Over all choices."""
        return sum(output.num_tokens for output in self.outputs.values())

    @property
    def finish_reasons(self) -> list[str]:
        return [output.finish or "abort" for output in self.outputs.values()]

    def add(self, news: News) -> None:
        self.news.put_nowait((self.position, news))

    def sent(self, now: float) -> None:
        """The first bytes of a stream went to the client."""
        self.first_sent_at = now
        if self.timeline is not None:
            self.timeline.first_sent_at = now

    def end(self, action: Finish | Fail) -> None:
        """No more will come."""
        if isinstance(action, Finish):
            self.timeline = action.timeline
            self.num_cached_tokens = action.num_cached_tokens
            self.timeline.first_sent_at = self.first_sent_at
            self.add(Ended(action.timeline))
        else:
            self.add(action.error)


@dataclass(frozen=True, slots=True)
class Call:
    """What one HTTP call waits for: the tickets of its prompts, and one queue for all of them.

    The queue needs no bound of its own: max_tokens bounds what can come. Text is made when tokens
    arrive, not when the client reads, so a slow reader delays no stop string.
    """

    tickets: tuple[Ticket, ...]
    _news: asyncio.Queue[tuple[int, News]]

    async def next(self) -> list[tuple[int, Piece | Ended]]:
        """All news there are, at least one, each with its prompt's position.

        Raises what a request failed with, once everything before it was read. The requests' own
        deadline, which the state machine keeps, bounds the wait.
        """
        taken = [await self._news.get()]
        found: list[tuple[int, Piece | Ended]] = []
        while taken:
            position, news = taken.pop()
            if isinstance(news, SplitserveError):
                if not found:
                    raise news
                self._news.put_nowait((position, news))
                break
            found.append((position, news))
            if not self._news.empty():
                taken.append(self._news.get_nowait())
        return found


class TicketBox:
    """Owns the tickets of all requests that have not ended."""

    def __init__(self, post: Callable[[Event], None]) -> None:
        self._post = post
        self._tickets: dict[str, Ticket] = {}

    def open(self, prompts: Sequence[tuple[str, Mapping[int, ChoiceOutput]]]) -> Call:
        """Tickets for the prompts of one call: (request_id, choice_id → its output) of each."""
        news: asyncio.Queue[tuple[int, News]] = asyncio.Queue()
        tickets = tuple(
            Ticket(request_id, position, dict(outputs), news)
            for position, (request_id, outputs) in enumerate(prompts)
        )
        self._tickets.update({ticket.request_id: ticket for ticket in tickets})
        return Call(tickets, news)

    def deliver(self, action: Deliver) -> Piece | None:
        """Tokens became text; None when nobody wants them any more."""
        ticket = self._tickets.get(action.request_id)
        if ticket is None:
            return None
        output = ticket.outputs[action.choice_id]
        if output.finish is not None:  # what came in one message with the stop string
            self._stopped(action, len(action.tokens))
            return None
        piece = output.push(action.tokens, action.finish)
        if piece.stopped_by_text:
            self._stopped(action, len(action.tokens) - len(piece.tokens))
        ticket.add(piece)
        return piece

    def _stopped(self, action: Deliver, num_wasted: int) -> None:
        self._post(ChoiceStopped(action.request_id, action.choice_id, num_wasted))

    def end(self, action: Finish | Fail) -> Ticket | None:
        """No more will come for this request."""
        ticket = self._tickets.pop(action.request_id, None)
        if ticket is not None:
            ticket.end(action)
        return ticket

    def cancel(self, request_id: str) -> Ticket | None:
        """The client gave its ticket back; nothing to do when its request has ended."""
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None:
            self._post(RequestCancelled(request_id))
        return ticket
