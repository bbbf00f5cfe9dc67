"""A message in a few words, for the record of a run."""

from __future__ import annotations

from typing import Any

from splitserve.wire import messages as m

_SHOWN = ("worker_id", "role", "launch_id", "request_id", "attempt", "decode_worker_id", "stage")
_SHOWN_TOO = ("reason", "retriable", "kept", "draining", "reaped", "exit_code", "held", "keep")


def brief(message: Any) -> str:
    """Its name and what tells it from others."""
    words = [type(message).__name__]
    for name in (*_SHOWN, *_SHOWN_TOO):
        value = getattr(message, name, None)
        if value not in (None, "", False, ()):
            words.append(f"{name}={value}" if name in _SHOWN_TOO else str(value))
    words += [_row(row) for row in getattr(message, "rows", ())]
    if isinstance(message, m.FrameHeader):
        words.append(f"tokens {message.region.token_start}-{message.region.token_end}")
    return " ".join(words)


def _row(row: m.TokenRow) -> str:
    end = f" {row.finish}" if row.finish else ""
    last = row.first_index + len(row.tokens) - 1
    return f"[{row.request_id}/{row.attempt} choice {row.choice_id}: {row.first_index}-{last}{end}]"
