"""Which sequences a decode worker computes next. Pure: no clock, no tensors, no sockets.

        begin                     finished, released
    ────────────► running ─────────────────────────────►
                  │     ▲
    no block left │     │ every block it needs is free again
      (youngest)  ▼     │
                 preempted          its KV is computed anew, chunk by chunk

Room goes to growth of running sequences first, oldest first, then to preempted ones, then (by the
intake) to prompts that wait. The oldest running sequence is never preempted, so something always
moves.
"""

from __future__ import annotations

from bisect import insort

from splitserve.scheduling.block_manager import BlockManager, blocks_for
from splitserve.scheduling.chunking import Planned, plan_chunks
from splitserve.scheduling.prefix_cache import PrefixCache
from splitserve.scheduling.sequence import RequestKey, Sequence


def _age(sequence: Sequence) -> tuple[int, int]:
    return (sequence.order, sequence.choices[0].choice_id)


class DecodeScheduler:
    """Owns the running and the preempted sequences of one worker."""

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
        self._running: list[Sequence] = []  # oldest first
        self._preempted: list[Sequence] = []  # oldest first
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_preempted(self) -> int:
        return len(self._preempted)

    @property
    def num_choices(self) -> int:
        """Answers that are or will be decoded here; a prompt counts each of its choices."""
        return sum(len(s.choices) for s in (*self._running, *self._preempted))

    @property
    def sequences(self) -> list[Sequence]:
        return [*self._running, *self._preempted]

    @property
    def spare_blocks(self) -> int:
        """Free blocks beyond the one kept for the growth of each running sequence."""
        return self.blocks.num_free - len(self._running)

    def begin(self, sequence: Sequence) -> None:
        """A sequence that holds all its blocks joins."""
        insort(self._running, sequence, key=_age)

    def schedule(self) -> list[Planned]:
        """The next step: one token of each running answer, and chunks of prompts behind them."""
        self._resume()
        self._grow()
        ready = [s for s in self._running if self._has_blocks(s)]
        answers = [s for s in ready if s.num_uncomputed == 1]
        prompts = [s for s in ready if s.num_uncomputed > 1]
        # However many answers there are, the oldest prompt moves on.
        return plan_chunks([*answers, *prompts], max(self._budget, len(answers) + self._block_size))

    def computed(self, plan: list[Planned]) -> None:
        for chunk in plan:
            chunk.sequence.num_computed = chunk.end
            chunk.sequence.keep_in(self.cache)

    def finish(self, sequence: Sequence) -> None:
        """The sequence leaves and its blocks are freed."""
        self._running.remove(sequence)
        self._free(sequence)

    def take(self, sequence: Sequence) -> None:
        """The sequence leaves with its blocks: it is about to be forked."""
        self._running.remove(sequence)

    def release(self, key: RequestKey) -> list[Sequence]:
        """Every sequence of a request, at this attempt or one before it, leaves; its blocks are
        freed."""
        gone = [
            s
            for s in self.sequences
            if s.request.key.request_id == key.request_id and s.request.key.attempt <= key.attempt
        ]
        for sequence in gone:
            if sequence in self._running:
                self.finish(sequence)
            else:
                self._preempted.remove(sequence)
        return gone

    def _grow(self) -> None:
        """A block for each running sequence that needs one, at the cost of the youngest."""
        for sequence in list(self._running):
            while sequence in self._running and not self._has_blocks(sequence):
                block_ids = self.blocks.allocate(1)
                if block_ids is not None:
                    sequence.block_ids += block_ids
                elif self._running[-1] is self._running[0]:
                    break  # alone, and reservations hold the rest: it waits for them
                else:
                    self._preempt(self._running[-1])

    def _preempt(self, sequence: Sequence) -> None:
        self.finish(sequence)
        sequence.num_computed = 0
        insort(self._preempted, sequence, key=_age)
        self.num_preemptions += 1

    def _resume(self) -> None:
        """Preempted sequences come back, oldest first, when all they need is free."""
        while self._preempted:
            sequence = self._preempted[0]
            needed = self._blocks_for(sequence)
            if self._running and self.spare_blocks < needed + len(sequence.choices) - 1:
                return
            if self.blocks.num_free < needed + len(sequence.choices) - 1:
                return
            self._restore(sequence, needed)
            self._preempted.pop(0)
            self.begin(sequence)

    def _restore(self, sequence: Sequence, needed: int) -> None:
        """Blocks again, and what they held as far as it is still cached. That is no hit: nobody
        asked for it anew."""
        known = self.cache.match(sequence.token_ids, len(sequence.token_ids) - 1)
        num_missing = needed - len(known.block_ids)
        missing = self.blocks.allocate(num_missing + len(sequence.choices) - 1)
        assert missing is not None, "there was room a moment ago"
        sequence.block_ids = [*known.block_ids, *missing[:num_missing]]
        sequence.spare_block_ids = missing[num_missing:]
        sequence.num_computed, sequence.node = known.num_tokens, known.node

    def _has_blocks(self, sequence: Sequence) -> bool:
        return len(sequence.block_ids) >= blocks_for(len(sequence.token_ids), self._block_size)

    def _blocks_for(self, sequence: Sequence) -> int:
        """Blocks for its tokens and the next one."""
        return len(sequence.token_ids) // self._block_size + 1

    def _free(self, sequence: Sequence) -> None:
        self.cache.release(sequence.request.key)
        self.blocks.free([*sequence.block_ids, *sequence.spare_block_ids])
        sequence.block_ids, sequence.spare_block_ids = [], []
