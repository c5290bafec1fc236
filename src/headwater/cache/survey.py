"""What a leg would find in the index and have to take: looked up before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.cache.index import Index
from headwater.cache.lease import Lease
from headwater.cache.node import Node
from headwater.plan import CacheLayout, Draft


@dataclass(slots=True, eq=False)
class Survey:
    """The finds of one leg; depths in units."""

    path: list[Node]  # from the lease's node (or the root) along the key
    end: int  # depth to which KV is there; the last node of the path may go deeper
    resume: Node | None  # the checkpoint to restore
    saves: tuple[int, ...]  # token positions of checkpoints that are not there yet
    guesses: tuple[int, ...]  # likewise, speculative
    kv: int  # pages of KV to take
    states: int  # pages of checkpoints and slot to take


class Surveyor:
    """Reads drafts against the index. Changes nothing."""

    def __init__(self, layout: CacheLayout, index: Index) -> None:
        self.layout = layout
        self._index = index
        self._every_page = layout.resumable == "every_page"

    def survey(self, draft: Draft, lease: Lease | None) -> Survey:
        """Look the leg up. ValueError for a draft that does not follow from the lease or names what is gone."""
        self._validate(draft, lease)
        unit = self.layout.unit_tokens
        path, end, resume = self._find(draft, lease)
        have = {node.end * unit for node in path if node.checkpoint is not None and node.end <= end}
        shares = draft.reuse if lease is None else lease.node is not None
        wanted = shares and not self._every_page
        saves = tuple(at for at in draft.checkpoints if at not in have) if wanted else ()
        guesses = tuple(at for at in draft.speculative if at not in have) if wanted else ()
        named = 0 if lease is None else len(lease.table)
        kv = self.table_pages(draft.end) - max(end * self._index.unit_pages, named)
        states = len(saves) * self.layout.checkpoint_pages
        if draft.slot and (lease is None or not lease.slot):
            states += self.layout.slot_pages
        return Survey(path, end, resume, saves, guesses, kv, states)

    def _validate(self, draft: Draft, lease: Lease | None) -> None:
        unit = self.layout.unit_tokens
        if lease is not None and lease.plan is not None:
            raise ValueError(f"request {draft.request} has plan {lease.plan} open")
        if lease is not None and draft.start != lease.end:
            raise ValueError(f"leg starts at {draft.start}, the one before ended at {lease.end}")
        if lease is None and draft.start and not draft.reuse:
            raise ValueError(f"leg starts at {draft.start} without reuse")
        if not draft.start < draft.end:
            raise ValueError(f"leg ends at {draft.end} and starts at {draft.start}")
        if draft.publish > draft.end or draft.publish // unit > len(draft.key) // self.layout.unit_bytes:
            raise ValueError(f"publish {draft.publish} exceeds end {draft.end} or key of {len(draft.key)} bytes")
        for at in (*draft.checkpoints, *draft.speculative):
            if not draft.start < at <= draft.publish or at % unit:
                raise ValueError(f"checkpoint at {at} is not on the grid of {unit} in ({draft.start}, {draft.publish}]")

    def _find(self, draft: Draft, lease: Lease | None) -> tuple[list[Node], int, Node | None]:
        """The path and depth that the leg may share, and the checkpoint that a first one resumes from."""
        unit = self.layout.unit_tokens
        if lease is None:
            if not draft.reuse:
                return [], 0, None
            root = self._index.roots.get(draft.namespace)
            limit = max(draft.start, draft.publish) // unit
            last, end = (None, 0) if root is None else self._index.walk(root, draft.key, limit)
            path = [] if last is None else self._index.path(last)
            return path, end, self._resume_node(draft, path, end)
        node = lease.node
        on_grid = lease.own_from == len(lease.table)  # no private page in between
        if node is None or not on_grid:
            return [], 0, None
        last, end = self._index.walk(node, draft.key, draft.publish // unit)
        return self._index.path(last, node), end, None

    def _resume_node(self, draft: Draft, path: list[Node], end: int) -> Node | None:
        if not draft.start:
            return None
        start, rest = divmod(draft.start, self.layout.unit_tokens)
        if rest or start > end:
            raise ValueError(f"leg starts at {draft.start}, cached are {end * self.layout.unit_tokens} tokens")
        if self._every_page:
            return None
        for node in path:
            if node.end == start and node.checkpoint is not None:
                return node
        raise ValueError(f"leg starts at {draft.start}, where no checkpoint is")

    def table_pages(self, end: int) -> int:
        """Return the number of KV pages of `end` tokens."""
        return -(-end // self.layout.page_size) * self.layout.kv_pages_per_unit
