"""Which worker gets a request, among those with room. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from coordinator.registry import Worker
from coordinator.tracked import Load

Policy = Literal["round_robin", "least_loaded"]


class Router:
    """Owns whose turn it is. Equal loads take turns, so an idle cluster is used evenly."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._turn = 0
        self._chosen_at: dict[str, int] = {}  # worker_id → turn in which it was last chosen

    def choose(self, workers: Sequence[Worker], loads: Mapping[str, Load]) -> Worker | None:
        """The worker for the next request, or None when there is none to choose from."""
        if not workers:
            return None
        worker = min(workers, key=lambda w: self._rank(w, loads.get(w.worker_id, Load())))
        self._turn += 1
        self._chosen_at[worker.worker_id] = self._turn
        return worker

    def forget(self, worker_id: str) -> None:
        self._chosen_at.pop(worker_id, None)

    def _rank(self, worker: Worker, load: Load) -> tuple[float, ...]:
        last = self._chosen_at.get(worker.worker_id, 0)
        if self._policy == "round_robin":
            return (last, worker.order)
        if worker.role == "prefill":
            return (load.num_prompt_tokens, load.num_prompt_blocks, last, worker.order)
        # Blocks and batch slots run out separately: compare by the scarcer of the two.
        blocks = load.num_decode_blocks / worker.facts.num_blocks
        choices = load.num_choices / worker.facts.max_num_seqs
        return (max(blocks, choices), last, worker.order)
