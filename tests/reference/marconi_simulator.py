"""Marconi's published simulator, request by request: our index and policies, and what it does differently overridden.

It counts bytes at page size 1, may exceed its capacity, pins nothing and has one time a node. Its departures from the
paper (the bytes booked for a leaf, the MLP's term, the prefix as denominator, the tuner) are kept, as
`peers/marconi/README.md` describes them; but for false descent, which no published trace comes to. That is the
artifact (github.com/ruipeterpan/marconi at 0801661) as described, not its code.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

from headwater.cache.eviction.flop_aware import FlopAware
from headwater.cache.index import Index
from headwater.cache.node import Node, Observer
from headwater.plan import CacheLayout

TOKEN_BYTES = 4  # of a token in a key
CHECKPOINT_BYTES, KV_BYTES = 26_787_840, 65_536
D, N = 4096, 128  # width, state
ATTENTION, SSM, MLP = 4, 24, 28  # layers
ALPHAS = [step / 10 for step in range(21)]
SCORED = 500  # replayed requests, the last ones, that the tuner scores

LAYOUT = CacheLayout(n_pages=1, page_size=1, unit_tokens=1, unit_bytes=TOKEN_BYTES, kv_pages_per_unit=0)


def attention_flops(length: int) -> int:
    return 8 * length * D**2 + 4 * length**2 * D


def mlp_flops(length: int) -> int:
    return 16 * length * D**2


def ssm_flops(length: int) -> int:
    return 12 * length * D**2 + 16 * length * D * N + 10 * length * D


def flops(length: int) -> int:
    """Return the FLOPs that a hit of this length saves."""
    return SSM * ssm_flops(length) + ATTENTION * attention_flops(length) + MLP * mlp_flops(length)


@dataclass(frozen=True)
class Served:
    """Outcome of one request: tokens found; (kind, prefix length, edge length) of each node evicted for it."""

    hit: int
    evictions: tuple[tuple[str, int, int], ...]


@dataclass(order=True)
class Leaf:
    """Leaf in a heap, ordered only by its time: equal ones come in the order of the heap."""

    time: int
    node: Node = field(compare=False)


class PathLru(Observer):
    """v1, "SGLang+": of the leaves, the one that was visited longest ago goes."""

    keeps_history = False

    def victims(self, root: Node, now: int) -> Iterator[Node]:
        heap = [Leaf(node.kv_time, node) for node in preorder(root) if not node.children]
        heapify(heap)
        while heap:
            node = heappop(heap).node
            parent = node.parent
            assert parent is not None, "the root is not in the heap"
            yield node
            if not parent.children and parent is not root:
                heappush(heap, Leaf(parent.kv_time, parent))


class Published(FlopAware):
    """v2 and v3: the paper's score, but for the MLP's term; ties go to the first in pre-order."""

    def __init__(self, alpha: float) -> None:
        super().__init__(LAYOUT, alpha, memory="prefix", parent="immediate")

    def value(self, node: Node) -> float:
        start, end = (node.end if node.parent is None else node.parent.end), node.end
        saved = SSM * ssm_flops(end - start) + ATTENTION * (attention_flops(end) - attention_flops(start))
        saved += MLP * (mlp_flops(end) - attention_flops(start))
        return saved / (CHECKPOINT_BYTES + KV_BYTES * end)

    def victims(self, root: Node, now: int) -> Iterator[Node]:
        nodes = self._kept.keys
        while True:
            self.settle()
            if not nodes:
                return
            recency = minmax(1 / (now - np.asarray(self._kept.time)))
            score = self.alpha * minmax(np.asarray(self._kept.value)) + recency
            yield min((nodes[row] for row in np.flatnonzero(score == score.min())), key=place)


def minmax(column: np.ndarray) -> np.ndarray:
    low, high = column.min(), column.max()
    return (column - low) / (high - low) if high > low else np.ones_like(column)


def preorder(root: Node) -> Iterator[Node]:
    """All nodes below the root."""
    stack = list(reversed(root.children.values()))
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(node.children.values()))


def place(node: Node) -> tuple[int, ...]:
    """Orders nodes as a pre-order walk meets them."""
    indices = []
    while node.parent is not None:
        indices.append(list(node.parent.children.values()).index(node))
        node = node.parent
    return tuple(reversed(indices))


@dataclass
class Simulator:
    """v1 (`alpha` None), v3 (a fixed `alpha`) and, in `Tuned`, v2."""

    capacity: float
    alpha: float | None = None
    size: int = field(default=0, init=False)  # bytes

    def __post_init__(self) -> None:
        self.policy = PathLru() if self.alpha is None else Published(self.alpha)
        self.index = Index(TOKEN_BYTES, 0, self.policy)
        self.root = self.index.root("")
        self.index.pin(self.root)
        self.now = 0

    def serve(self, prompt: bytes, whole: bytes) -> Served:
        """One request: its input is looked up, then input and output are inserted."""
        hit, _ = self.lookup(prompt)
        evictions = self.insert(whole)
        return Served(hit, tuple(evictions))

    def lookup(self, key: bytes) -> tuple[int, int]:
        """Tokens of the edges that match in full, and of all that matches. Refreshes what it finds."""
        self.now += 1
        node, end = self.index.walk(self.root, key, len(key) // TOKEN_BYTES)
        full = node if end == node.end else node.parent
        assert full is not None, "the root matches in full"
        if self.alpha is None:
            self.index.touch(node, None, self.now)
        elif full is not self.root:
            self.index.resume(full, self.now)
        return full.end, end

    def insert(self, key: bytes) -> list[tuple[str, int, int]]:
        self.now += 1
        length = len(key) // TOKEN_BYTES
        hit, matched = self.lookup(key)
        wanted = self.size + (1 + (matched > hit)) * CHECKPOINT_BYTES + (length - matched) * KV_BYTES - self.capacity
        evictions = self.evict(wanted) if wanted > 0 else []
        node, end = self.index.walk(self.root, key, length)
        if end < node.end:
            node = self.index.split(node, end)
            self.admit(node)
        if self.alpha is None:
            self.index.touch(node, None, self.now)
        if end < length:
            self.admit(self.index.add(node, key, length, array("i")))
            self.size += (length - end) * KV_BYTES
        return evictions

    def admit(self, node: Node) -> None:
        self.index.save(node, (), self.now)
        node.kv_time = self.now
        self.size += CHECKPOINT_BYTES

    def evict(self, wanted: float) -> list[tuple[str, int, int]]:
        """Evict until the booked bytes reach `wanted`."""
        self.now += 1
        evictions = []
        booked = 0.0
        for node in self.policy.victims(self.root, self.now):
            assert node.parent is not None, "the root is not a candidate"
            edge = node.end - node.parent.end
            evictions.append(("M" if node.children else "L", node.end, edge))
            booked += CHECKPOINT_BYTES
            if node.children:
                self.merge(node)
            else:
                booked += (edge if self.alpha is None else self.last_edge()) * KV_BYTES
                self.index.drop(node)
                self.size -= edge * KV_BYTES
            self.size -= CHECKPOINT_BYTES
            if booked >= wanted:
                break
        return evictions

    def merge(self, node: Node) -> None:
        (child,) = node.children.values()
        self.index.drop(node)
        if node.checkpoint_time > child.checkpoint_time:
            self.index.resume(child, node.checkpoint_time)

    def last_edge(self) -> int:
        """Length of the last candidate's edge in pre-order, which is booked for the evicted leaf, whichever it is."""
        node: Node = self.root
        while node.children:
            node = next(reversed(node.children.values()))
        assert node.parent is not None, "there is a leaf"
        return node.end - node.parent.end


@dataclass
class Tuned(Simulator):
    """v2: once `multiplier` times as many requests have come as until the first eviction, the best alpha is taken.

    That is the one with most FLOPs saved when all requests so far are replayed from an empty tree; of equals the first
    in `order`, in which the original's processes happened to be done.
    """

    multiplier: int = 5
    order: list[float] = field(default_factory=lambda: ALPHAS)
    saved: dict[float, int] = field(default_factory=dict, init=False)  # FLOPs for each alpha

    def __post_init__(self) -> None:
        self.alpha = 0.0
        super().__post_init__()
        self.requests: list[tuple[bytes, bytes]] = []
        self.window: int | None = None

    def serve(self, prompt: bytes, whole: bytes) -> Served:
        self.requests.append((prompt, whole))
        return super().serve(prompt, whole)

    def insert(self, key: bytes) -> list[tuple[str, int, int]]:
        if len(self.requests) == self.window:
            self.saved = {alpha: self.replay(alpha) for alpha in self.order}
            self.alpha = self.policy.alpha = max(self.order, key=lambda alpha: self.saved[alpha])
        return super().insert(key)

    def evict(self, wanted: float) -> list[tuple[str, int, int]]:
        self.window = self.window or self.multiplier * len(self.requests)
        return super().evict(wanted)

    def replay(self, alpha: float) -> int:
        """FLOPs that the last requests would have been saved."""
        simulator = Simulator(self.capacity, alpha)
        served = [simulator.serve(*request) for request in self.requests]
        return sum(flops(request.hit) for request in served[-SCORED:])
