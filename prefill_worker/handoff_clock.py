"""When what of one hand-off happened, as its prefill worker saw it."""

from __future__ import annotations

from dataclasses import dataclass

from splitserve.wire import messages as m


@dataclass(slots=True)
class HandoffClock:
    """Owns the moments of the way to the present decode worker; only the first token is older."""

    first_token_at: float = 0.0  # when it was drawn; soon afterwards: when it was sent
    granted_at: float = 0.0
    first_frame_at: float | None = None
    last_frame_at: float = 0.0

    def granted(self, at: float) -> None:
        """The Grant came `at`; the loop may have been in a step then."""
        self.granted_at = self.last_frame_at = at
        self.first_frame_at = None

    def sent(self, now: float) -> None:
        """A frame went out."""
        self.first_frame_at = now if self.first_frame_at is None else self.first_frame_at
        self.last_frame_at = now

    def times(self, received_at: float, waited_s: float) -> m.HandoffTimes:
        """All of it, when Received came; `waited_s` is what the decode worker counts as its own.

        That is a peer's word: whatever it says, nothing here is longer than it took.
        """
        both_at = max(self.first_token_at, self.granted_at)
        first_frame_at = self.granted_at if self.first_frame_at is None else self.first_frame_at
        return m.HandoffTimes(
            grant_wait_s=both_at - self.first_token_at,
            transfer_s=max(0.0, received_at - both_at - max(0.0, waited_s)),
            kv_transfer_s=received_at - self.granted_at,
            first_byte_s=first_frame_at - self.granted_at,
            last_byte_s=self.last_frame_at - self.granted_at,
        )
