"""Order of eviction: the interface of a policy, and the heaps, tables and scores that policies share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum, auto

from headwater.cache.node import Node, Observer
from headwater.plan import Draft


class Room(Enum):
    """The region that lacks pages."""

    ANY = auto()  # one pool: whatever gives a page
    KV = auto()  # split pool: pages of KV
    STATE = auto()  # split pool: pages of checkpoints


class Kind(Enum):
    """The part of a victim that is evicted."""

    CHECKPOINT = auto()
    TAIL = auto()  # the last pages of an unpinned leaf without checkpoint, as many as are needed
    NODE = auto()  # an unpinned leaf's checkpoint, if it has one, and all the KV of its edge


Victim = tuple[Node, Kind]


class Eviction(Observer, ABC):
    """An eviction policy: observes every change of a node, keeps its own order of nodes and chooses what to evict.

    A checkpoint can be evicted from any node that has no holds, a tail from any leaf that has neither pins nor
    checkpoint, a whole node if it is a leaf without pins. Ages are at least 1; of equal nodes the one with the lower
    serial is evicted.
    """

    clock: Callable[[], float] = staticmethod(lambda: 0.0)  # seconds, by which retentions lapse; the cache sets it
    keeps_history: bool = True  # whether branch points are also found along edges whose KV is gone (see History)

    @abstractmethod
    def victim(self, room: Room, now: int) -> Victim | None:
        """Return what to evict next; None if nothing that helps `room` can be evicted. Changes nothing."""

    def begun(self, draft: Draft, node: Node, now: int) -> None:
        """Note a first leg, of a prompt, an answer or a load, which resumes at this node or begins at this root.

        The node is pinned; its time is refreshed, and room is made, afterwards. By default it is ignored.
        """
        return None

    def reuse_rate(self, node: Node, now: int) -> float:
        """Return how often a tick the end of a node is expected to be used again. By default 1 / its age."""
        return 1 / (1 + now - max(node.checkpoint_time, node.kv_time))

    def tail_rate(self, position: int, uses: int, age: int) -> float:
        """Return the same of a tail after a position in tokens, `age` ticks after the last of its uses."""
        return 1 / (1 + age)

    def tail_watched(self, position: int, uses: int, age: int, used: float) -> None:
        """Note that a tail was kept for `age` ticks, until a request used this share of its tokens; 0: none did.

        By default it is ignored.
        """
        return None

    def retain(self, node: Node, seconds: float) -> None:
        """Note a client's hint: keep the node's checkpoint for so long from now on. By default it is ignored."""
        return None

    def prefer(self, node: Node, priority: int, is_new: bool) -> None:
        """Note a client's hint: the priority of a request that took the node's checkpoint, or passed it.

        It counts among those of the checkpoint's namespace; 0 is that of requests without a hint. By default it is
        ignored.
        """
        return None

    def surplus(self, node: Node, now: int) -> Victim | None:
        """Return what to evict although no room is needed, after a commit of a path to `node`; None: nothing (more)."""
        return None
