"""Which copies go first when a tier needs room. Pure.

Score = last use + 1 h × log2(1 + hits), hits halved every 6 h: a prefix that was used often outlives one that was used
lately. The lowest goes first. Wall-clock seconds: they only order evictions, and have to survive a restart.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from operator import itemgetter

from barrel_inference.tiers.prefix_tree import Node

HIT_WORTH_S = 3600.0
HITS_HALVE_S = 6 * 3600.0


def hits_now(node: Node, now_s: float) -> float:
    """Its hits, faded since the last use."""
    return node.hits * math.exp2(-max(0.0, now_s - node.last_used_unix_s) / HITS_HALVE_S)


def score(node: Node, now_s: float) -> float:
    """How much a node is worth keeping; comparable between nodes at one instant."""
    # A use in the future was noted by a clock that has been set back since: it must not keep the row until then.
    return min(node.last_used_unix_s, now_s) + HIT_WORTH_S * math.log2(1 + hits_now(node, now_s))


# Hits fade while a node waits in the heap; the order is computed anew after so long.
_RESCORE_S = 3600.0


class Victims:
    """The order of eviction on one tier server: a heap that is put right when something is taken from it.

    Only copies without a child copy on the same server are candidates; a parent becomes one when its last child there has
    gone. So nothing that is stored on a server is ever cut off from its root by an eviction there. As claims hold whole
    paths, there is a candidate as long as anything may go.
    """

    def __init__(self, server: str) -> None:
        self.server = server
        self._heap: list[tuple[float, int, Node]] = []
        self._count = itertools.count()
        self._scored_s = 0.0

    def add(self, node: Node, now_s: float) -> None:
        """A copy may have become a candidate."""
        heapq.heappush(self._heap, self._entry(node, now_s))

    def take(
        self, now_s: float, is_spared: Callable[[Node], bool], *, pinned_last: bool = False
    ) -> Generator[Node, None, None]:
        """Candidates, lowest score first, each at most once; what is spared, pinned or claimed stays in the order.

        The caller takes the copy of each that it accepts away, and stops when it has enough.

        Args:
            pinned_last: when there is nothing else, yield pinned ones too.
        """
        self._rescore(now_s)
        kept: dict[int, Node] = {}
        pinned: list[tuple[float, int, Node]] = []
        try:
            while True:
                node = self._pop(now_s)
                if node is None and pinned_last and pinned:
                    node = heapq.heappop(pinned)[2]
                elif node is None:
                    return
                elif id(node) in kept:
                    continue
                elif node.is_pinned and not (node.claims or is_spared(node)):
                    kept[id(node)] = node
                    heapq.heappush(pinned, self._entry(node, now_s))
                    continue
                kept[id(node)] = node  # before the yield: a caller may stop here and leave the copy where it is
                if self.server in node.copies and not (node.claims or is_spared(node)):
                    yield node
        finally:
            for node in kept.values():
                if self.server in node.copies:
                    self.add(node, now_s)

    def _pop(self, now_s: float) -> Node | None:
        """The lowest candidate, with its present score."""
        while self._heap:
            noted, _, node = heapq.heappop(self._heap)
            if self.server not in node.copies or node.has_child_on(self.server):
                continue
            current = self._entry(node, now_s)
            if current[0] <= noted + 1e-6:
                return node
            heapq.heappush(self._heap, current)  # used since it was noted: its place is further back
        return None

    def _rescore(self, now_s: float) -> None:
        if abs(now_s - self._scored_s) > _RESCORE_S:
            self._scored_s = now_s
            distinct = {id(node): node for _, _, node in self._heap if self.server in node.copies}
            self._heap = [self._entry(node, now_s) for node in distinct.values()]
            heapq.heapify(self._heap)

    def _entry(self, node: Node, now_s: float) -> tuple[float, int, Node]:
        return score(node, now_s), next(self._count), node


def merged(orders: Iterable[Victims], now_s: float, is_spared: Callable[[Node], bool]) -> Iterator[tuple[str, Node]]:
    """The candidates of several servers in one order: which server's copy goes next, lowest score first.

    The caller takes each copy away before it asks for the next.
    """
    takes = [(order.server, order.take(now_s, is_spared)) for order in orders]
    try:
        for _score, server, node in heapq.merge(*(_scored(*one, now_s) for one in takes), key=itemgetter(0)):
            if server in node.copies:  # it may have gone along with what it went on from, on another server
                yield server, node
    finally:
        for _server, take in takes:
            take.close()


def _scored(server: str, take: Iterator[Node], now_s: float) -> Iterator[tuple[float, str, Node]]:
    for node in take:
        yield score(node, now_s), server, node
