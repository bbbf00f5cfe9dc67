"""Server-sent events, cut out of a byte stream. Only what this API sends: `data:` lines."""

from __future__ import annotations

DONE = b"[DONE]"
_MAX_EVENT_BYTES = 64 << 20


class EventParser:
    """Owns the unfinished tail of an event stream.

    Lines end at a newline byte and nowhere else: text inside JSON may hold other separators.
    """

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every event that ended within `chunk`. ValueError when one is too long."""
        *lines, self._tail = (self._tail + chunk).split(b"\n")
        if len(self._tail) > _MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {_MAX_EVENT_BYTES} bytes")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
