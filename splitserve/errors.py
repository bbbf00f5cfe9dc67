"""Errors that peers and users cause. Our own bugs are `assert`s, not these.

SplitserveError
├── InvalidRequestError   the request breaks a rule; the message names field and limit (HTTP 4xx)
├── ModelNotFoundError    no such model: on this cluster (HTTP 404), or on this machine
├── OverloadedError       the queue is full; try again later (HTTP 429)
├── UnavailableError      nothing can serve this now (HTTP 503)
├── RequestFailedError    accepted, then lost: a worker died, a deadline passed (HTTP 5xx)
├── StreamBrokenError     a client's stream ended without its end marker
├── ConfigError           a flag, an environment variable or a file says something impossible
├── LaunchError           a process did not come up; names it and the cause
└── ProtocolError         bytes or messages that break the wire protocol
    └── MismatchError     a peer does not fit this cluster; names both sides
"""

from __future__ import annotations


class SplitserveError(Exception):
    """Base of everything this package raises on purpose."""


class InvalidRequestError(SplitserveError):
    """A request breaks a rule. `param` names the field, as OpenAI's errors do."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class ModelNotFoundError(SplitserveError):
    """The named model is not here; the message says how to get it."""


class OverloadedError(SplitserveError):
    """The queue is full. `retry_after_s` is a hint for the client."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(SplitserveError):
    """No worker can take this request at present."""


class RequestFailedError(SplitserveError):
    """An accepted request was lost. `stage` says where; `status` is the HTTP status it maps to."""

    def __init__(self, message: str, *, stage: str = "internal", status: int = 500) -> None:
        super().__init__(message)
        self.stage = stage
        self.status = status


class StreamBrokenError(SplitserveError):
    """A stream ended before the server said it was complete."""


class ConfigError(SplitserveError):
    """Configuration that can't work; the message names the key and the limit."""


class LaunchError(SplitserveError):
    """A process of the cluster did not come up, or went down; names the process and the cause."""


class ProtocolError(SplitserveError):
    """Received bytes that are not a message of this protocol."""


class MismatchError(ProtocolError):
    """A peer's layout, fingerprint or limits differ from the cluster's; names both sides."""
