"""One line a log record, with the role and the id of who speaks; and a limit on repetition."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname).1s {who} %(name)s: %(message)s"


class _OneLine(logging.Formatter):
    """Keeps a record on one line, save for a traceback, which needs its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\n", "\\n")


def set_up_logging(who: str, level: str = "info") -> None:
    """Send this process's log to stderr, one line a record, each naming `who` (role, worker id).

    Call it once, at the start of a process. Levels as in `--log-level`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(_FORMAT.format(who=who.replace("%", "%%")), "%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in ("httpx", "httpcore", "uvicorn.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


class LimitedLog:
    """Logs a kind of line at most once an interval; the next one says how many were left out."""

    def __init__(
        self,
        logger: logging.Logger,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}  # kind → (last logged at, left out since)

    def warning(self, kind: str, message: str) -> None:
        """Log `message`, unless one of this kind was logged within the interval."""
        now = self._clock()
        logged_at, num_left_out = self._seen.get(kind, (-float("inf"), 0))
        if now - logged_at < self._interval_s:
            self._seen[kind] = (logged_at, num_left_out + 1)
            return
        suffix = f" ({num_left_out} more like this)" if num_left_out else ""
        self._logger.warning("%s%s", message, suffix)
        self._seen[kind] = (now, 0)
