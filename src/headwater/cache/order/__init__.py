"""What an eviction policy is."""

from __future__ import annotations

from enum import Enum, auto
from typing import Protocol

from headwater.cache.node import Node


class Room(Enum):
    """What pages are wanted for."""

    ANY = auto()  # one pool: whatever gives a page
    KV = auto()  # split pool: pages of KV
    STATE = auto()  # split pool: pages of checkpoints


class Kind(Enum):
    """What is taken from a victim."""

    CHECKPOINT = auto()
    TAIL = auto()  # the last pages of an unpinned leaf without checkpoint, as many as are wanted
    NODE = auto()  # an unpinned leaf's checkpoint, if it has one, and all the KV of its edge


Victim = tuple[Node, Kind]


class Eviction(Protocol):
    """Chooses what goes. It is told of every change of a node, and keeps its own order of them.

    A checkpoint may go from any node that has no holds; a tail from any leaf that has neither pins nor checkpoint; all
    of a node where it is a leaf without pins. Ages are at least 1; ties go to the node with the lower serial.
    """

    keeps_history: bool  # where prompts left the tree is found by edges that outlive their pages, too

    def changed(self, node: Node) -> None:
        """The node's checkpoint, holds, children or edge changed, or a leaf's pins, or it left the tree (no parent).

        One that has neither a checkpoint nor an end of its own to trim may leave unannounced, absorbed by its child.
        """

    def touched(self, node: Node) -> None:
        """One of the node's two times was refreshed; if the KV's, then also all nodes' above it."""

    def victim(self, room: Room, now: int) -> Victim | None:
        """What to give up next; None if nothing that would help may go."""

    def surplus(self, node: Node, now: int) -> Victim | None:
        """What goes whether room is needed or not, now that a path down to `node` was committed; None: nothing more."""
