"""What became of one request: when each of its tokens came, or why it failed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from splitserve.bench_http import RawReply
from splitserve.sse import DONE, EventParser


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as its client saw it. `token_times_s` counts from sending; a chunk of several
    tokens gives each its own entry. The other times count from the begin of the run."""

    token_times_s: tuple[float, ...]
    error: str | None = None
    num_hidden: int = 0  # tokens in no chunk of their own, entered with the last chunk
    num_cached: int = 0  # tokens of the prompt that the server took from a cache, as it says
    kind: str = ""  # of a mixed load: stream or long
    sent_s: float = 0.0
    ended_s: float = 0.0
    late_s: float = 0.0  # from when it was due until it was sent: the client's own delay

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        if len(self.token_times_s) < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (len(self.token_times_s) - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between neighbouring tokens; the first is the hand-off gap."""
        times = self.token_times_s
        return [later - earlier for earlier, later in itertools.pairwise(times)]


@dataclass(slots=True)
class _Seen:
    """What the events of a reply have told until now."""

    times_s: list[float] = field(default_factory=list)
    told_ids: bool = False  # chunks say which tokens they hold, so their number is known
    num_by_usage: int | None = None
    num_cached: int = 0

    def add(self, at_s: float, body: Mapping[str, Any]) -> None:
        if body.get("usage"):
            self.num_by_usage = body["usage"]["completion_tokens"]
            details = body["usage"].get("prompt_tokens_details") or {}  # vLLM may say null
            self.num_cached = int(details.get("cached_tokens") or 0)
        choice = body["choices"][0] if body.get("choices") else {}
        token_ids = choice.get("token_ids")
        if token_ids is not None:
            self.told_ids = True
            self.times_s += [at_s] * len(token_ids)
        elif choice.get("text"):
            self.times_s.append(at_s)


def outcome_of(reply: RawReply | str, num_asked: int | None = None) -> Outcome:
    """What the bytes of a reply meant. An answer of another length than asked for is an error:
    the server did other work than the one it is compared by."""
    if isinstance(reply, str):
        return Outcome((), reply)
    if reply.status != 200:
        text = b"".join(data for _, data in reply.parts)[:200].decode(errors="replace")
        return Outcome((), f"HTTP {reply.status}: {text}")
    try:
        return _read(reply, num_asked)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return Outcome((), f"an event that can't be read: {error!r}")


def _read(reply: RawReply, num_asked: int | None) -> Outcome:
    parser, seen = EventParser(), _Seen()
    for at, data in reply.parts:
        for event in parser.feed(data):
            if event == DONE:
                return _counted(seen, num_asked)
            body = json.loads(event)
            if error := body.get("error"):
                message = error.get("message", error) if isinstance(error, dict) else error
                return Outcome((), f"error event: {message}")
            seen.add(at - reply.sent_at, body)
    return Outcome((), "the stream was cut without [DONE]")


def looks_whole(reply: RawReply | str) -> bool:
    """Cheaper than `outcome_of`, for use while a run goes on: no failure is plain to see."""
    if isinstance(reply, str) or reply.status != 200:
        return False
    end = b"".join(data for _, data in reply.parts[-3:])
    return DONE in end and b'"error"' not in end


def _counted(seen: _Seen, num_asked: int | None) -> Outcome:
    """Tokens seen against the server's own count, and that against what was asked for.

    A chunk without token ids may hold several tokens, so there the server may count more: the
    others are entered with the last chunk, and their number is kept.
    """
    times = tuple(seen.times_s)
    if not times:
        return Outcome((), "an answer without tokens")
    number = len(times) if seen.num_by_usage is None else seen.num_by_usage
    num_hidden = number - len(times)
    if num_hidden < 0 or (num_hidden and seen.told_ids):
        return Outcome((), f"usage counts {number} tokens, its chunks held {len(times)}")
    if num_asked is not None and number != num_asked:
        return Outcome((), f"{num_asked} tokens were asked for, {number} came (ignore_eos is on)")
    times += (times[-1],) * num_hidden
    return Outcome(times, num_hidden=num_hidden, num_cached=seen.num_cached)
