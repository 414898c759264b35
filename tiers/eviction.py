"""Which copies go first when a tier needs room. Pure.

Score = last use + 1 h × log2(1 + hits), hits halved every 6 h: a prefix that was used often outlives one that was used
lately. The lowest goes first. Wall-clock seconds: they only order evictions, and have to survive a restart.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator

from barrel_inference.tiers.prefix_tree import Node

HIT_WORTH_S = 3600.0
HITS_HALVE_S = 6 * 3600.0


def hits_now(node: Node, now_s: float) -> float:
    """Its hits, faded since the last use."""
    return node.hits * math.exp2(-max(0.0, now_s - node.last_used_unix_s) / HITS_HALVE_S)


def score(node: Node, now_s: float) -> float:
    """How much a node is worth keeping; comparable between nodes at one instant."""
    return node.last_used_unix_s + HIT_WORTH_S * math.log2(1 + hits_now(node, now_s))


class Victims:
    """The order of eviction on one tier server: a heap that is put right when something is taken from it.

    Copies with a child copy on the same server are not in it; a parent enters when its last child there has gone.
    """

    def __init__(self, server: str) -> None:
        self.server = server
        self._heap: list[tuple[float, int, Node]] = []
        self._count = itertools.count()

    def add(self, node: Node, now_s: float) -> None:
        """A copy may have become a candidate."""
        heapq.heappush(self._heap, (score(node, now_s), next(self._count), node))

    def take(self, now_s: float, is_spared: Callable[[Node], bool]) -> Iterator[Node]:
        """Candidates, lowest score first, each at most once; what is spared, pinned or claimed stays in the order.

        The caller takes the copy of each that it accepts away, and stops when it has enough.
        """
        kept: list[Node] = []
        seen: set[int] = set()
        try:
            while self._heap:
                noted, _, node = heapq.heappop(self._heap)
                if id(node) in seen or not self._is_candidate(node):
                    continue
                current = score(node, now_s)
                if current > noted + 1e-6:  # used since it was noted: its place is further back
                    heapq.heappush(self._heap, (current, next(self._count), node))
                    continue
                seen.add(id(node))
                if node.claims or node.is_pinned or is_spared(node):
                    kept.append(node)
                    continue
                yield node
                if self.server in node.copies:
                    kept.append(node)
        finally:
            for node in kept:
                if self.server in node.copies:
                    self.add(node, now_s)

    def _is_candidate(self, node: Node) -> bool:
        return self.server in node.copies and not node.has_child_on(self.server)
