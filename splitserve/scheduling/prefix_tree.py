"""Which cached block holds which tokens behind which others, and which of them to give up first.

A node is a full block below its parent, found by its tokens: a dict compares them, so that two
prefixes are never taken for one another, whatever their digests. Above the first blocks is one root
per namespace.

    root ── [The capital of] ── [France is] ── [Paris]        each box a block
                            └── [Italy is]

A node is *held* while somebody references its block or one behind it. What is not held is *idle*,
in the order in which it became so. A node becomes idle after all behind it and is held again no
later than they are, so whatever is behind an idle node is idle and comes before it: the first in
the line is the least recently used, and a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from splitserve.scheduling.kv_events import AllCleared, BlockRemoved, BlockStored, KVEventLog
from splitserve.scheduling.prefix_key import block_key, root_key


class PrefixNode:
    """A place in the tree: how far a sequence's blocks are known there. A root, unless a block."""

    __slots__ = ("children", "depth", "generation", "key", "namespace", "num_holds")

    def __init__(self, key: bytes, namespace: str, generation: int, depth: int = 0) -> None:
        self.key = key
        self.namespace = namespace
        self.generation = generation  # of the tree; a clear begins another one
        self.depth = depth  # in blocks
        self.children: dict[tuple[int, ...], CachedBlock] = {}
        self.num_holds = 0  # children that are held, and one for references to its own block


class CachedBlock(PrefixNode):
    """A block in the tree, or one that was."""

    __slots__ = ("block_id", "parent", "token_ids")

    def __init__(self, parent: PrefixNode, token_ids: tuple[int, ...], block_id: int) -> None:
        key = block_key(parent.key, token_ids)
        super().__init__(key, parent.namespace, parent.generation, parent.depth + 1)
        self.parent = parent
        self.token_ids = token_ids
        self.block_id = block_id


class PrefixTree:
    """Owns the nodes, and the order in which idle ones are evicted."""

    def __init__(self, block_size: int, log: KVEventLog) -> None:
        self._block_size = block_size
        self._log = log
        self._generation = 0
        self._roots: dict[str, PrefixNode] = {}  # those with children
        self._nodes: dict[int, CachedBlock] = {}  # by block id
        self._idle: OrderedDict[int, CachedBlock] = OrderedDict()  # by block id, next to go first

    @property
    def num_evictable(self) -> int:
        return len(self._idle)

    def is_idle(self, node: CachedBlock) -> bool:
        return node.block_id in self._idle

    def root(self, namespace: str) -> PrefixNode:
        root = self._roots.get(namespace)
        return root or PrefixNode(root_key(namespace), namespace, self._generation)

    def walk(self, root: PrefixNode, token_ids: Sequence[int], limit: int) -> list[CachedBlock]:
        """The longest known prefix of at most `limit` tokens, in whole blocks."""
        path: list[CachedBlock] = []
        node, size = root, self._block_size
        for end in range(size, min(limit, len(token_ids)) + 1, size):
            child = node.children.get(tuple(token_ids[end - size : end]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def nearest(self, node: PrefixNode) -> PrefixNode | None:
        """The node, or if it was evicted what is left above it; None if the tree was cleared."""
        if node.generation != self._generation:
            return None
        while isinstance(node, CachedBlock):
            if self._nodes.get(node.block_id) is node:
                return node
            node = node.parent
        return self._roots.setdefault(node.namespace, node)

    def add(self, parent: PrefixNode, token_ids: tuple[int, ...], block_id: int) -> CachedBlock:
        """A block that is referenced joins below `parent`, which is in the tree."""
        node = CachedBlock(parent, token_ids, block_id)
        parent.children[token_ids] = node
        self._nodes[block_id] = node
        self._hold(node)
        self._log.append(BlockStored(node.key, parent.key))
        return node

    def referenced(self, block_id: int) -> None:
        """A block has its first reference again."""
        self._hold(self._nodes[block_id])

    def unreferenced(self, block_id: int) -> None:
        """A block has lost its last reference."""
        self._let_go(self._nodes[block_id])

    def evict(self) -> int:
        """Forget the least recently used leaf that is idle; its block id."""
        block_id, node = self._idle.popitem(last=False)
        assert not node.children, f"block {block_id} would leave blocks behind it"
        del self._nodes[block_id], node.parent.children[node.token_ids]
        if not node.parent.children and not isinstance(node.parent, CachedBlock):
            del self._roots[node.namespace]  # namespaces may be as many as requests
        self._log.append(BlockRemoved(node.key))
        return block_id

    def clear(self) -> None:
        """Forget everything. What was known of a sequence is void: it adds nothing more."""
        self._roots.clear()
        self._nodes.clear()
        self._idle.clear()
        self._generation += 1
        self._log.append(AllCleared())

    def stored(self) -> Iterator[BlockStored]:
        """Every block that is here, parents first."""
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            if isinstance(node, CachedBlock):
                yield BlockStored(node.key, node.parent.key)

    def check(self, references: Mapping[int, int]) -> None:
        """AssertionError unless the tree holds exactly these blocks and knows who is idle."""
        assert self._nodes.keys() == references.keys(), "a block is kept that is not in the tree"
        assert sum(1 for _ in self.stored()) == len(self._nodes), "a block can't be found"
        place = {block_id: n for n, block_id in enumerate(self._idle)}
        for block_id, node in self._nodes.items():
            children = list(node.children.values())
            held = sum(child.num_holds > 0 for child in children) + (references[block_id] > 0)
            assert node.num_holds == held, f"block {block_id} is held wrongly"
            assert (block_id in place) == (held == 0), f"block {block_id} is idle and held"
            if block_id in place:
                assert all(place[child.block_id] < place[block_id] for child in children)

    def _hold(self, node: PrefixNode) -> None:
        node.num_holds += 1
        while node.num_holds == 1 and isinstance(node, CachedBlock):
            self._idle.pop(node.block_id, None)
            node = node.parent
            node.num_holds += 1

    def _let_go(self, node: PrefixNode) -> None:
        node.num_holds -= 1
        while node.num_holds == 0 and isinstance(node, CachedBlock):
            self._idle[node.block_id] = node
            node = node.parent
            node.num_holds -= 1
