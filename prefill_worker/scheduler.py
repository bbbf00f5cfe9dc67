"""Which prompts a prefill worker computes next. Pure: no clock, no tensors, no sockets.

submit ──► waiting ── admit: every block, or none ──► computing ── computed ──► held ── free
"""

from __future__ import annotations

from collections import OrderedDict

from splitserve.scheduling.block_manager import BlockManager, blocks_for
from splitserve.scheduling.chunking import Planned, plan_chunks
from splitserve.scheduling.sequence import Request, RequestKey, Sequence


class PrefillScheduler:
    """Owns the worker's prompts and the blocks they hold, until the hand-off frees them."""

    def __init__(self, blocks: BlockManager, block_size: int, max_num_batched_tokens: int) -> None:
        self.blocks = blocks
        self._block_size = block_size
        self._budget = max_num_batched_tokens
        self._waiting: OrderedDict[RequestKey, Request] = OrderedDict()
        self._computing: OrderedDict[RequestKey, Sequence] = OrderedDict()
        self._held: dict[RequestKey, Sequence] = {}
        self._num_admitted = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_computing(self) -> int:
        return len(self._computing)

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._computing or self._held)

    def knows(self, key: RequestKey) -> bool:
        return key in self._waiting or key in self._computing or key in self._held

    def submit(self, request: Request) -> None:
        self._waiting[request.key] = request

    def never_fits(self, request: Request) -> bool:
        """Whether the prompt needs more blocks than there are, or is none."""
        return not request.token_ids or self._blocks_for(request) > self.blocks.counts.total

    def admit(self) -> list[Sequence]:
        """Prompts that now hold every block they need, in order of arrival."""
        admitted = []
        while self._waiting:
            request = next(iter(self._waiting.values()))
            block_ids = self.blocks.allocate(self._blocks_for(request))
            if block_ids is None:
                break
            del self._waiting[request.key]
            self._num_admitted += 1
            sequence = Sequence(
                request, request.choices, list(request.token_ids), self._num_admitted, block_ids
            )
            sequence.is_prompt = True
            self._computing[request.key] = sequence
            admitted.append(sequence)
        return admitted

    def schedule(self) -> list[Planned]:
        return plan_chunks(self._computing.values(), self._budget)

    def computed(self, plan: list[Planned]) -> None:
        """The step is done: chunks count, and whole prompts wait for their hand-off."""
        for chunk in plan:
            chunk.sequence.num_computed = chunk.end
            if chunk.samples:
                key = chunk.sequence.request.key
                self._held[key] = self._computing.pop(key)

    def block_ids(self, key: RequestKey) -> list[int]:
        """The blocks of an admitted prompt."""
        return (self._computing.get(key) or self._held[key]).block_ids

    def release(self, key: RequestKey) -> bool:
        """Forget a prompt wherever it is and free its blocks. False when it is not here."""
        if self._waiting.pop(key, None) is not None:
            return True
        sequence = self._computing.pop(key, None) or self._held.pop(key, None)
        if sequence is None:
            return False
        self.blocks.free(sequence.block_ids)
        return True

    def requests(self) -> list[Request]:
        """Every prompt here, oldest first."""
        admitted = [*self._held.values(), *self._computing.values()]
        return [*(sequence.request for sequence in admitted), *self._waiting.values()]

    def _blocks_for(self, request: Request) -> int:
        return blocks_for(len(request.token_ids), self._block_size)
