"""Who is sent when in a mixed load: streams that always run, long prompts on a schedule. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from splitserve.bench.workloads import MixedSpec

Kind = Literal["stream", "long"]


@dataclass(frozen=True, slots=True)
class Send:
    """A request to send, `due_s` after the begin of the run."""

    kind: Kind
    number: int
    due_s: float


class MixedLoad:
    """Owns how many streams were sent, and how many long prompts have no answer yet.

    A stream that has ended is replaced until the time is over and every long prompt is answered:
    the last of those meet the same streams as the first. A stream that failed is not replaced, so
    that a server that refuses at once is not flooded; such a run has errors to show.
    """

    def __init__(self, spec: MixedSpec) -> None:
        self._spec = spec
        self._num_streams = 0
        self._ends_at_s = spec.undisturbed_s + spec.duration_s
        self._num_unanswered = len(self.long_prompts())

    def streams(self) -> list[Send]:
        """Those that start the run."""
        return [self._next_stream(0.0) for _ in range(self._spec.num_streams)]

    def long_prompts(self) -> list[Send]:
        """All of them; each is sent when due, whatever became of the ones before."""
        spec, sends = self._spec, list[Send]()
        while (after_s := len(sends) * spec.period_s) < spec.duration_s:
            sends.append(Send("long", len(sends), spec.undisturbed_s + after_s))
        return sends

    def ended(self, sent: Send, is_whole: bool, now_s: float) -> Send | None:
        """A request has its answer, or failed; the stream to send in its place, if any."""
        if sent.kind == "long":
            self._num_unanswered -= 1
            return None
        is_over = now_s >= self._ends_at_s and self._num_unanswered == 0
        return None if is_over or not is_whole else self._next_stream(now_s)

    def _next_stream(self, now_s: float) -> Send:
        self._num_streams += 1
        return Send("stream", self._num_streams - 1, now_s)
