"""A compressed radix tree over units of fixed byte width; KV pages and checkpoints sit on its nodes.

Edges are `bytes`, compared whole with memcmp; children are found by an edge's first unit; every split, match and
checkpoint is at a unit boundary. Content is compared, never replaced by a hash. A pin is on the node at which a
request's path ends: KV is evicted from the leaves to the root, so the pin also protects all nodes above.
Lengths and positions in this file are in units.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from headwater.cache.changes import IGNORED, Changes
from headwater.cache.node import EvictionLog, Node, Observer, Root


class Index:
    """The trees of all namespaces. It has no free pages: pages that it no longer needs are returned to the caller."""

    def __init__(
        self, unit_bytes: int, unit_pages: int, observer: Observer | None = None, changes: Changes = IGNORED
    ) -> None:
        self.unit_bytes, self.unit_pages = unit_bytes, unit_pages
        self.roots: dict[str, Root] = {}
        self.eviction_log = EvictionLog()
        self.nodes = 0  # roots not counted
        self.kv_pages = 0
        self.dead_pages = 0  # KV of nodes with no checkpoint at or below them
        self.checkpoints = 0
        self.saved = 0  # checkpoints that were ever stored
        self.saved_speculative = 0  # speculative ones of `saved`
        self.serial = 0  # of the node that was created last
        self.version = 0  # raised by each change of nodes, KV or checkpoints: matches of older versions are stale
        self._observer = observer or Observer()
        self._changes = changes

    # ---- reading

    def walk(self, node: Node, key: bytes, limit: int) -> tuple[Node, int]:
        """Follow `key` from the end of `node` to at most `limit`.

        Returns the last node that was entered (`node` itself if none was) and the depth reached, which lies before
        that node's end where it is matched in part.
        """
        width, matches = self.unit_bytes, key.startswith
        at, stop = node.end * width, limit * width
        while at < stop:
            child = node.fast_child
            if child is None:
                break
            after = child.end * width
            if after > stop or not matches(child.edge, at):
                child = node.children.get(key[at : at + width])
                if child is None:
                    break
                after = child.end * width
                if after > stop or not matches(child.edge, at):
                    return child, at // width + self._common(child.edge, key, at, stop)
            node, at = child, after
        return node, at // width

    def _common(self, edge: bytes, key: bytes, at: int, stop: int) -> int:
        """Return the number of equal units at the begin of `edge` and `key[at:stop]`; the first ones are equal."""
        width = self.unit_bytes
        low, high = 1, min(len(edge), stop - at) // width + 1
        while high - low > 1:
            middle = (low + high) // 2
            if key.startswith(edge[low * width : middle * width], at + low * width):
                low = middle
            else:
                high = middle
        return low

    def find(self, namespace: str, key: bytes, limit: int | None = None) -> tuple[list[Node], int]:
        """Return the nodes that `key` enters, from its namespace's root to at most `limit`, and the depth reached."""
        root = self.roots.get(namespace)
        if root is None:
            return [], 0
        last, end = self.walk(root, key, len(key) // self.unit_bytes if limit is None else limit)
        return self.path(last), end

    def shared(self, namespace: str, key: bytes) -> int:
        """Return the depth up to which `key` is also the prefix of another path."""
        path, depth = self.find(namespace, key)
        if path and (path[-1].end > depth or path[-1].children):
            return depth
        return next((node.end for node in reversed(path[:-1]) if len(node.children) > 1), 0)

    @staticmethod
    def path(node: Node, top: Node | None = None) -> list[Node]:
        """Return the nodes from below `top` (or the root) down to `node`."""
        nodes: list[Node] = []
        while node is not top and node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    @staticmethod
    def deepest_checkpoint(node: Node | None, end: int) -> Node | None:
        """Return the last checkpoint at or before `end` on the path to `node`; None if there is none."""
        while node is not None and (node.checkpoint is None or node.end > end):
            node = node.parent
        return node

    @staticmethod
    def deepest_with_states(node: Node, end: int) -> int:
        """Return the last depth up to `end` on the path to `node` at which work can resume, if states are in pages."""
        for part in node.climb():
            if part.parent is not None and part.parent.end < end < part.gap_end:
                end = part.parent.end
        return end

    def contents(self, changes: Changes) -> None:
        """Report all KV and checkpoints to `changes`, as if they were stored now."""
        for node in self:
            changes.kv_stored(node, self.unit_pages)
            if node.checkpoint:
                changes.checkpoint_stored(node, self.unit_pages)

    def __iter__(self) -> Iterator[Node]:
        """Yield all nodes but the roots, parents first."""
        stack: list[Node] = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def key_of(self, node: Node) -> bytes:
        """Return the key from the root to a node's end."""
        return b"".join(part.edge for part in self.path(node))

    def namespace(self, node: Node) -> str:
        *_, root = node.climb()
        assert isinstance(root, Root), f"{node} is not in the tree"
        return root.namespace

    # ---- growing

    def root(self, namespace: str) -> Root:
        """Return the root of `namespace`; it is created if there is none."""
        if namespace not in self.roots:
            self.roots[namespace] = Root(namespace, self._next_serial())
        return self.roots[namespace]

    def boundary(self, node: Node, end: int) -> Node:
        """Return the node on the path to `node` that ends at `end`, after a split if necessary."""
        while node.parent is not None and node.parent.end >= end:
            node = node.parent
        return node if node.end == end else self.split(node, end)

    def split(self, node: Node, end: int) -> Node:
        """Cut `node` at `end`. Returns the new upper part; checkpoint and pins stay with the lower one."""
        self.version += 1
        parent = node.parent
        assert parent is not None, f"{node} is a root"
        assert parent.end < end < node.end, f"{node} cannot be split at {end}"
        cut = end - parent.end
        width = cut * self.unit_bytes
        upper = Node(parent, node.edge[:width], node.pages[: cut * self.unit_pages], end, self._next_serial())
        upper.origins = (node.serial, *node.origins[:3])
        upper.kv_time, upper.gap_end = node.kv_time, node.gap_end
        upper.live = 1 if node.live else 0
        parent.adopt(node.unit, upper)
        node.edge, node.pages = node.edge[width:], node.pages[cut * self.unit_pages :]
        upper.adopt(node.edge[: self.unit_bytes], node)
        self._observer.changed(node)
        if node.lost:
            upper.lost = tuple(at for at in node.lost if at <= end)
            node.lost = tuple(at for at in node.lost if at > end)
        self.nodes += 1
        return upper

    def grow(self, node: Node, key: bytes, stops: Sequence[int], table: array[int]) -> tuple[list[Node], Node | None]:
        """Make a node end at each of `stops` (ascending) along `key` below `node`.

        New edges get their pages from `table`, which holds those of [0, stops[-1]). Returns the nodes at `stops`, and
        the node below which all is new, if anything is. That node may be superfluous now: call `tidy` on it once
        checkpoints and pins are set.
        """
        ends: list[Node] = []
        joint: Node | None = None
        for stop in stops:
            while node.end < stop:
                last, end = self.walk(node, key, stop)
                if last is not node:
                    node = self.boundary(last, end)
                else:
                    joint = joint or node
                    node = self.add(node, key, stop, table[node.end * self.unit_pages : stop * self.unit_pages])
            ends.append(node)
        return ends, joint

    def add(self, parent: Node, key: bytes, end: int, pages: array[int]) -> Node:
        """Add the rest of `key` up to `end` as a child of `parent`; no child begins with its first unit."""
        self.version += 1
        node = Node(parent, key[parent.end * self.unit_bytes : end * self.unit_bytes], pages, end, self._next_serial())
        parent.adopt(node.edge[: self.unit_bytes], node)
        self.nodes += 1
        self.kv_pages += len(pages)
        self.dead_pages += len(pages)
        self._observer.changed(parent)
        self._observer.changed(node)
        self._changes.kv_stored(node, self.unit_pages)
        return node

    def load(self, nodes: Sequence[Node]) -> None:
        """Count nodes, parents first, that were hung below roots with their pages and checkpoints."""
        self.version += 1
        for node in reversed(nodes):
            assert node.parent is not None, f"{node} is a root"
            node.live += node.checkpoint is not None
            node.parent.live += node.live > 0
            self.kv_pages += len(node.pages)
            self.dead_pages += 0 if node.live else len(node.pages)
            self.checkpoints += node.checkpoint is not None
        self.nodes += len(nodes)
        for node in sorted(nodes, key=lambda node: (node.checkpoint_time, node.serial)):
            self._observer.changed(node)

    def save(
        self, node: Node, pages: Sequence[int], now: int, speculative: bool = False, learned: bool = False
    ) -> None:
        """Put a checkpoint at the end of a node that has none."""
        self.version += 1
        assert node.checkpoint is None, f"{node} has a checkpoint"
        node.checkpoint, node.speculative, node.checkpoint_time, node.hits = pages, speculative, now, 0
        node.learned = learned
        node.live += 1
        if node.live == 1:
            self._count_alive(node, 1)
        if node.lost:
            node.lost = tuple(at for at in node.lost if at != node.end)
        self.checkpoints += 1
        self.saved += 1
        self.saved_speculative += speculative
        self._observer.changed(node)
        if len(pages):
            self._changes.checkpoint_stored(node, self.unit_pages)

    def _count_alive(self, node: Node, change: int) -> None:
        """Count KV as alive (1) or dead (-1) after the first or last checkpoint at or below `node` came or went.

        This concerns the ancestors, too, up to one that another checkpoint keeps alive.
        """
        others = change > 0  # how often a node is alive by only this change
        climb: Node | None = node
        while climb is not None:
            self.dead_pages -= change * len(climb.pages)
            climb = climb.parent
            if climb is not None:
                climb.live += change
                if climb.live > others:
                    return

    def touch(self, node: Node, top: Node | None, now: int) -> None:
        """Refresh the KV's time from `node` up to, and without, `top`."""
        climb: Node | None = node
        while climb is not None and climb is not top:
            climb.kv_time = now
            climb = climb.parent
        self._observer.touched(node)

    def resume(self, node: Node, now: int) -> None:
        """Mark the checkpoint as confirmed and just used: a request resumed there."""
        node.checkpoint_time, node.speculative = now, False
        self._observer.changed(node)
        self._observer.touched(node)

    def confirm(self, node: Node, now: int) -> None:
        """Mark the checkpoint as confirmed if it was speculative: a placement asks for one at this position."""
        if node.speculative:
            self.resume(node, now)

    def doubt(self, node: Node) -> None:
        """Mark the checkpoint as speculative, until a request resumes there: none is expected."""
        if not node.speculative:
            node.speculative = True
            self._observer.changed(node)

    # ---- pins

    def pin(self, node: Node, hold: bool = False) -> None:
        """Protect KV up to this node from eviction; with `hold` the checkpoint, too."""
        node.pins += 1
        node.holds += hold
        if (node.pins == 1 and not node.children) or (hold and node.holds == 1):
            self._observer.changed(node)

    def unpin(self, node: Node, hold: bool = False) -> None:
        """Undo one `pin`, and its `hold`."""
        node.pins -= 1
        node.holds -= hold
        if (not node.pins and not node.children) or (hold and not node.holds):
            self._observer.changed(node)
        if not node.pins:
            self.tidy(node)

    def hold(self, node: Node, hold: bool = True) -> None:
        """Protect the checkpoint of a pinned node, or undo that."""
        node.holds += 1 if hold else -1
        if node.holds == hold:
            self._observer.changed(node)

    # ---- shrinking

    def drop(self, node: Node, evicted: bool = True) -> Sequence[int]:
        """Remove the node's checkpoint and return its pages. evicted: whether the log remembers it."""
        self.version += 1
        pages = node.checkpoint
        assert pages is not None, f"{node} has no checkpoint"
        assert not node.tails, f"{node} has tails, which begin with its checkpoint"
        node.checkpoint, node.speculative, node.learned = None, False, False
        if evicted:
            node.lost += (node.end,)
        self.checkpoints -= 1
        node.live -= 1
        if not node.live:
            self._count_alive(node, -1)
        if len(pages):
            self._changes.removed(pages, len(pages))
        self._observer.changed(node)
        self.tidy(node, evicted)
        return pages

    def trim(self, node: Node, units: int, evicted: bool = True) -> array[int]:
        """Remove the last `units` of an unpinned leaf without checkpoint; return their pages. evicted: as in `drop`."""
        self.version += 1
        assert not node.children, f"{node} is not a leaf"
        assert not node.pins, f"{node} is pinned"
        assert node.checkpoint is None, f"{node} has a checkpoint"
        assert not node.tails, f"{node} has tails, which begin at its end"
        parent = node.parent
        assert parent is not None, f"{node} is a root"
        end = node.end - units
        assert end >= parent.end, f"{node} has less than {units} units"
        keep = end - parent.end
        cut = keep * self.unit_bytes
        if evicted:
            self.eviction_log.add(self.namespace(parent), end, node.edge[cut : cut + self.unit_bytes])
        pages = node.pages[keep * self.unit_pages :]
        self.kv_pages -= len(pages)
        self.dead_pages -= len(pages)
        self._changes.removed(pages, self.unit_pages)
        if not keep:
            self._remove(node)
        else:
            node.edge, node.end = node.edge[:cut], end
            del node.pages[keep * self.unit_pages :]
            node.lost = tuple(at for at in node.lost if at <= end)
            self._observer.changed(node)
        return pages

    def _remove(self, node: Node) -> None:
        self.version += 1
        parent = node.parent
        assert parent is not None, f"{node} is a root"
        parent.disown(node)
        self.nodes -= 1
        self._observer.changed(node)
        self._observer.changed(parent)
        self.tidy(parent)

    def tidy(self, node: Node, evicted: bool = False) -> None:
        """Merge or remove a node that has lost a pin, a checkpoint or a child, if it is no longer needed."""
        if node.pins or node.checkpoint is not None or node.tails or len(node.children) > 1:
            return
        if isinstance(node, Root):
            if not node.children:
                self.version += 1
                del self.roots[node.namespace]
        elif node.children:
            if node.gap_end == next(iter(node.children.values())).gap_end:
                self._merge(node)
        elif not node.pages:
            if evicted and node.parent is not None:
                self.eviction_log.add(self.namespace(node), node.parent.end, node.unit)
            self._remove(node)

    def _merge(self, upper: Node) -> None:
        """Merge `upper` into its only child, which stays the same object: leases refer to it."""
        self.version += 1
        (child,) = upper.children.values()
        parent = upper.parent
        assert parent is not None, f"{upper} is a root"
        parent.adopt(upper.unit, child)
        child.edge, child.pages = upper.edge + child.edge, upper.pages + child.pages
        if upper.lost:
            child.lost = upper.lost + child.lost
        upper.parent = None
        self.nodes -= 1
        self._observer.changed(child)
        if upper.kv_time > child.kv_time:
            child.kv_time = upper.kv_time
            self._observer.touched(child)

    def _next_serial(self) -> int:
        self.serial += 1
        return self.serial
