"""Changes of a cache's content: KV, checkpoints and segments that are stored or removed, in their order.

A stored unit, checkpoint or segment is identified by its first page: no two of them share a page at one time, so a
removal needs no key. Positions are in units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.cache.node import Node, Root

NONE = -1  # stands for a page where there is none


@dataclass(frozen=True, slots=True)
class KvStored:
    """KV of adjacent units of one prefix."""

    namespace: str | None  # of a path's first units; None: `before` is in the same namespace
    before: int  # page of the unit that they continue; NONE at a path's begin
    start: int
    edge: bytes  # of the key: these units
    pages: Sequence[int]  # the first page of each unit


@dataclass(frozen=True, slots=True)
class CheckpointStored:
    """A checkpoint after `end` units of a prefix."""

    page: int
    end: int
    kv: int  # page of the unit that ends there; NONE for a model without attention, which has namespace and key
    namespace: str = ""
    key: bytes = b""


@dataclass(frozen=True, slots=True)
class SegmentStored:
    """A complete segment. `head` and `tail` are the tokens at its ends that are recomputed at each use."""

    page: int
    namespace: str
    ids: bytes  # four bytes a token
    head: int
    tail: int


@dataclass(frozen=True, slots=True)
class Removed:
    """Units, a checkpoint or a segment that were removed, by their pages."""

    pages: Sequence[int]


Change = KvStored | CheckpointStored | SegmentStored | Removed


class Changes:
    """Receiver of changes. This one ignores them."""

    def kv_stored(self, node: Node, unit_pages: int) -> None:
        """Note that all units of a node's edge were stored; the KV of each takes `unit_pages`."""

    def checkpoint_stored(self, node: Node, unit_pages: int) -> None:
        """Note that the checkpoint at a node's end was stored."""

    def segment_stored(self, stored: SegmentStored) -> None:
        """Note that a segment was completed."""

    def removed(self, pages: Sequence[int], each: int) -> None:
        """Note that the units, the checkpoint or the segment with these pages was removed; each has `each` pages."""


IGNORED = Changes()


class ChangeLog(Changes):
    """Log of changes, until they are taken."""

    def __init__(self) -> None:
        self._log: list[Change] = []

    def take(self) -> list[Change]:
        """Return the changes since the last call."""
        taken, self._log = self._log, []
        return taken

    def kv_stored(self, node: Node, unit_pages: int) -> None:
        parent = node.parent
        if not unit_pages or parent is None:
            return
        namespace, before = (parent.namespace, NONE) if isinstance(parent, Root) else (None, parent.pages[-unit_pages])
        self._log.append(KvStored(namespace, before, parent.end, node.edge, node.pages[::unit_pages]))

    def checkpoint_stored(self, node: Node, unit_pages: int) -> None:
        assert node.checkpoint is not None, f"{node} has no checkpoint"
        page = node.checkpoint[0]
        if unit_pages:
            self._log.append(CheckpointStored(page, node.end, node.pages[-unit_pages]))
            return
        *path, root = node.climb()
        assert isinstance(root, Root), f"{node} is not in the tree"
        key = b"".join(part.edge for part in reversed(path))
        self._log.append(CheckpointStored(page, node.end, NONE, root.namespace, key))

    def segment_stored(self, stored: SegmentStored) -> None:
        self._log.append(stored)

    def removed(self, pages: Sequence[int], each: int) -> None:
        if len(pages):
            self._log.append(Removed(pages[::each]))
