"""What goes into the coordinator's state machine, and what comes out.

Events are past tense, actions imperative. A client's text, its detokenizer and its stop strings
are outside: the state machine knows token ids only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from splitserve.errors import SplitserveError
from splitserve.request import FinishReason, SampledToken, Sampling
from splitserve.timeline import Timeline
from splitserve.wire import messages as m


@dataclass(frozen=True, slots=True)
class NewRequest:
    """One validated prompt. `request_id` is ours and random; a client's id is only a label."""

    request_id: str
    token_ids: tuple[int, ...]
    choices: tuple[m.Choice, ...]
    sampling: Sampling
    timeout_s: float
    priority: int = 0  # the lower value goes first
    wants_timing: bool = False
    received_at: float | None = None  # by the HTTP server; None: now


# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client is gone."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ChoiceStopped:
    """A stop string ended one choice. `num_wasted` tokens of it came behind; those that still
    come are wasted too."""

    request_id: str
    choice_id: int
    num_wasted: int = 0


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A peer's message, and the socket identity it came from."""

    identity: bytes
    message: m.ToCoordinator


@dataclass(frozen=True, slots=True)
class SendFailed:
    """A message could not be queued. `vanished`: nobody is connected under that identity."""

    identity: bytes
    message: Any
    vanished: bool


@dataclass(frozen=True, slots=True)
class HttpOpened:
    """HTTP answers at this URL."""

    base_url: str


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    """Fail what is in flight, take nothing new."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Deadlines may be due. `paused_s`: for how long this process itself stood still."""

    paused_s: float = 0.0


Event = (
    RequestCancelled
    | ChoiceStopped
    | MessageReceived
    | SendFailed
    | HttpOpened
    | ShutdownRequested
    | TimePassed
)


# -- actions -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Put a message on the control channel."""

    identity: bytes
    message: m.ToWorker | m.ToLauncher


@dataclass(frozen=True, slots=True)
class Deliver:
    """The next tokens of a choice, in order, each once; `finish` with the last of them."""

    request_id: str
    choice_id: int
    tokens: tuple[SampledToken, ...]
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class Finish:
    """Every choice of the request is complete."""

    request_id: str
    timeline: Timeline
    num_cached_tokens: int = 0  # of its prompt


@dataclass(frozen=True, slots=True)
class Fail:
    """The request is lost; nothing more will come for it."""

    request_id: str
    error: SplitserveError


Action = Send | Deliver | Finish | Fail
