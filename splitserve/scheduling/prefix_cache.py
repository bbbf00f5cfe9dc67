"""Prefixes whose KV this worker holds, so that they are neither computed nor sent again. Pure.

    match ──► pinned blocks ──┐
                              ├─► a sequence ── insert, each time blocks are full ──► in the tree
    claim, allocate, compute ─┘        └── free: its blocks in the tree stay cached
    or receive the rest

A sequence keeps the node that `match` or `insert` gave it last, and hands it in with the next
insert: that is where its further blocks go, without a walk from the root. A node is a value that
stays good whatever happens to the tree, and forks of a sequence may share it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from splitserve.scheduling.block_manager import BlockManager
from splitserve.scheduling.kv_events import AllCleared, KVEventLog, KVEvents
from splitserve.scheduling.prefix_claims import Claims
from splitserve.scheduling.prefix_tree import PrefixNode, PrefixTree


class Match(NamedTuple):
    """The cached part of a prompt, pinned: whoever asked holds one reference of each block."""

    block_ids: list[int]
    num_tokens: int
    node: PrefixNode


class Prospect(NamedTuple):
    """What a match would give now."""

    num_tokens: int
    num_evictable: int  # blocks of it that count as free until then


class PrefixCache:
    """Owns the tree of one worker's cached blocks, and the claims on those to come.

    Not `enabled`, it answers everything and keeps nothing.
    """

    def __init__(self, blocks: BlockManager, block_size: int, enabled: bool = True) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._enabled = enabled
        # More events than blocks are dearer to read than a list of the blocks.
        self._log = KVEventLog(capacity=blocks.counts.total)
        self._tree = PrefixTree(block_size, self._log)
        self._claims = Claims(block_size)
        blocks.attach(self._tree)

    def match(self, token_ids: Sequence[int], max_tokens: int, namespace: str = "") -> Match:
        """The longest cached prefix of at most `max_tokens` tokens, in whole blocks.

        Whoever computes the prompt passes its length - 1: the last token is always computed.
        """
        root = self._tree.root(namespace)
        path = self._tree.walk(root, token_ids, max_tokens)
        block_ids = [node.block_id for node in path]
        self._blocks.fork(block_ids)
        return Match(block_ids, len(path) * self._block_size, path[-1] if path else root)

    def peek(self, token_ids: Sequence[int], max_tokens: int, namespace: str = "") -> Prospect:
        """What `match` would give, with nothing pinned and nobody's turn to be evicted changed."""
        path = self._tree.walk(self._tree.root(namespace), token_ids, max_tokens)
        return Prospect(len(path) * self._block_size, sum(map(self._tree.is_idle, path)))

    def insert(
        self,
        node: PrefixNode,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        num_tokens: int,
    ) -> PrefixNode:
        """Cache the full blocks of a sequence's first `num_tokens` tokens; its node from now on.

        The KV of those tokens is in `block_ids`, computed or verified here, and the caller holds a
        reference of each. Where another's block has the same tokens its own stays out, as a plain
        used one, and so does what is behind it: else a block that nobody refers to could not be
        evicted, and a lone sequence might not fit.
        """
        num_full = num_tokens // self._block_size
        if not self._enabled or num_full <= node.depth:
            return node
        here = self._tree.nearest(node)
        if here is None:
            return node  # it began before everything was cleared
        for index in range(here.depth, num_full):
            start = index * self._block_size
            block = tuple(token_ids[start : start + self._block_size])
            child = here.children.get(block)
            if child is None:
                self._blocks.keep(block_ids[index])
                child = self._tree.add(here, block, block_ids[index])
            elif child.block_id != block_ids[index]:
                break
            here = child
        return here

    def clear(self) -> None:
        """Forget everything. Blocks in use are free when they are freed; nothing of what is being
        computed or received now will be cached, so no claim is left either."""
        self._claims.clear()
        self._tree.clear()
        self._blocks.keep_none()

    def claim(self, key: Hashable, token_ids: Sequence[int], namespace: str = "") -> None:
        """A request begins to compute or receive what is missing of its prompt."""
        if self._enabled:
            self._claims.add(key, token_ids, namespace)

    def release(self, key: Hashable) -> None:
        """A request has inserted its blocks, or has failed. Unknown ones are fine."""
        self._claims.release(key)

    def is_claiming(self, key: Hashable) -> bool:
        """Whether it is still worth waiting for this request."""
        return key in self._claims

    def blocked_by(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        namespace: str = "",
        key: Hashable | None = None,
    ) -> Hashable | None:
        """The request that is about to bring the first block missing here, if there is one.

        `key` is whoever asks; only older claims than its own block it.
        """
        path = self._tree.walk(self._tree.root(namespace), token_ids, max_tokens)
        end = (len(path) + 1) * self._block_size
        if end > min(max_tokens, len(token_ids)):
            return None
        return self._claims.oldest_with(tuple(token_ids[:end]), namespace, key)

    def events_since(self, number: int) -> KVEvents:
        """What changed behind event `number` (0: none seen), or else a list of all that is here."""
        events = self._log.since(number)
        if events is None:
            return KVEvents(self._log.last, (AllCleared(), *self._tree.stored()))
        return events
