"""Which prompts a prefill worker computes next. Pure: no clock, no tensors, no sockets.

submit ──► waiting ── admit: every block, or none ──► computing ── computed ──► held ── free

A prompt begins behind what is cached of it. While its next block is being computed for another, it
waits: then that one is cached too.

There is one attempt at a request at a time. It may become the next one in any state (`rekey`),
and keeps its place and its blocks.
"""

from __future__ import annotations

from collections import OrderedDict

from splitserve.scheduling.block_manager import BlockManager, blocks_for
from splitserve.scheduling.chunking import Planned, plan_chunks
from splitserve.scheduling.prefix_cache import PrefixCache
from splitserve.scheduling.sequence import Request, Sequence


class PrefillScheduler:
    """Owns the worker's prompts and the blocks they hold, until the hand-off frees them."""

    def __init__(
        self,
        blocks: BlockManager,
        block_size: int,
        max_num_batched_tokens: int,
        cache: PrefixCache | None = None,
    ) -> None:
        self.blocks = blocks
        self.cache = cache or PrefixCache(blocks, block_size, enabled=False)
        self._block_size = block_size
        self._budget = max_num_batched_tokens
        self._waiting: OrderedDict[str, Request] = OrderedDict()  # all by request_id
        self._computing: OrderedDict[str, Sequence] = OrderedDict()
        self._held: dict[str, Sequence] = {}
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

    def submit(self, request: Request) -> None:
        assert self._sequence(request.key.request_id) is None, "a second attempt"
        self._waiting[request.key.request_id] = request

    def never_fits(self, request: Request) -> bool:
        """Whether the prompt needs more blocks than there are, or is none."""
        return not request.token_ids or self._blocks_for(request) > self.blocks.counts.total

    def admit(self) -> list[Sequence]:
        """Prompts that now hold every block they need, in order of arrival."""
        admitted = []
        for request_id, request in list(self._waiting.items()):
            if self.cache.blocked_by(request.token_ids, len(request.token_ids) - 1) is not None:
                continue
            if not self._has_room(request):
                break
            del self._waiting[request_id]
            self._computing[request_id] = self._begin(request)
            admitted.append(self._computing[request_id])
        return admitted

    def schedule(self) -> list[Planned]:
        return plan_chunks(self._computing.values(), self._budget)

    def computed(self, plan: list[Planned]) -> None:
        """These chunks are computed, and prompts that are whole wait for their hand-off."""
        for chunk in plan:
            chunk.sequence.num_computed = chunk.end
            chunk.sequence.keep_in(self.cache)
            if chunk.samples:
                request_id = chunk.sequence.request.key.request_id
                self._held[request_id] = self._computing.pop(request_id)
                self.cache.release(request_id)

    def block_ids(self, request_id: str) -> list[int]:
        """The blocks of an admitted prompt."""
        sequence = self._sequence(request_id)
        assert sequence is not None, f"{request_id} holds no blocks"
        return sequence.block_ids

    def rekey(self, request: Request) -> None:
        """A prompt that is here is another attempt from now on."""
        request_id = request.key.request_id
        if request_id in self._waiting:
            self._waiting[request_id] = request
            return
        sequence = self._sequence(request_id)
        assert sequence is not None, f"{request_id} is not here"
        sequence.request = request

    def release(self, request_id: str) -> bool:
        """Forget a prompt wherever it is and free its blocks. False when it is not here."""
        if self._waiting.pop(request_id, None) is not None:
            return True
        sequence = self._computing.pop(request_id, None) or self._held.pop(request_id, None)
        if sequence is None:
            return False
        self.cache.release(request_id)
        self.blocks.free(sequence.block_ids)
        return True

    def _has_room(self, request: Request) -> bool:
        known = self.cache.peek(request.token_ids, len(request.token_ids) - 1)
        num_missing = self._blocks_for(request) - known.num_tokens // self._block_size
        return num_missing <= self.blocks.num_free - known.num_evictable

    def _begin(self, request: Request) -> Sequence:
        """The prompt holds all its blocks: what is cached, and new ones behind it."""
        known = self.cache.match(request.token_ids, len(request.token_ids) - 1)
        missing = self.blocks.allocate(self._blocks_for(request) - len(known.block_ids))
        assert missing is not None, "there was room a moment ago"
        self.cache.claim(request.key.request_id, request.token_ids)
        self._num_admitted += 1
        return Sequence(
            request,
            request.choices,
            list(request.token_ids),
            self._num_admitted,
            [*known.block_ids, *missing],
            num_computed=known.num_tokens,
            num_cached=known.num_tokens,
            node=known.node,
            is_prompt=True,
        )

    def _sequence(self, request_id: str) -> Sequence | None:
        return self._computing.get(request_id) or self._held.get(request_id)

    def _blocks_for(self, request: Request) -> int:
        return blocks_for(len(request.token_ids), self._block_size)
