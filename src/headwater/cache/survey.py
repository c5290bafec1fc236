"""Lookups: the cached part of a prompt, and what one of its legs shares and needs. They change nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from headwater.account import Reason
from headwater.cache.history import History
from headwater.cache.index import Index
from headwater.cache.lease import Lease
from headwater.cache.node import MidPage, Node
from headwater.cache.placement.base import Edge, Path
from headwater.cache.tails import Tails, common_bytes
from headwater.errors import StaleMatch
from headwater.plan import CacheLayout, Draft, Match


@dataclass(frozen=True, slots=True)
class Found(Match):
    """A match, with its place in the tree, so that reserving its first leg needs no second walk."""

    namespace: str = field(default="", compare=False)
    key: bytes = field(default=b"", compare=False, repr=False)
    last: Node | None = field(default=None, compare=False)  # the node in which the walk ended
    end: int = field(default=0, compare=False)  # depth of its end, in units: one unit more than a match may have
    cap: int = field(default=0, compare=False)  # the greatest depth that a match may have, in units
    mid_page: MidPage | None = field(default=None, compare=False, repr=False)  # that has its `tail_tokens`


@dataclass(slots=True, eq=False)
class Survey:
    """Shared content and missing pages of one leg. Depths in units."""

    path: list[Node]  # from the lease's node (or the root) along the key
    end: int  # depth of cached KV; the last node of the path may be deeper
    resume: Node | None  # the checkpoint to restore
    saves: tuple[int, ...]  # token positions of checkpoints that are not cached yet
    guesses: tuple[int, ...]  # likewise, speculative
    kv: int  # pages of KV to take
    states: int  # pages of checkpoints, tails and slot to take
    mid_page: MidPage | None = None  # that has the tokens before a start in mid-page
    tails: tuple[int, ...] = ()  # ends of tails to save, if they are worth their pages


class Surveyor:
    """Reads prompts and drafts against the index."""

    def __init__(self, layout: CacheLayout, index: Index, history: History | None, tails: Tails) -> None:
        self.layout = layout
        self._index, self._history, self._tails = index, history, tails
        self._every_page = layout.every_page

    # ---- prompts

    def match(self, namespace: str, key: bytes, length: int, near: tuple[Match, int] | None) -> Found:
        """Return the cached part of a prompt of `length` tokens, at most up to the last page before its last token.

        near: a fresh match in the same namespace, and the number of tokens that its key shares with this one.
        """
        unit, index = self.layout.unit_tokens, self._index
        units = len(key) // self.layout.unit_bytes
        cap = max(0, min((length - 1) // unit, units))
        last, walked = self._reach(namespace, key, min(length // unit, units), near)
        end = min(walked, cap)
        resume = None if last is None else index.deepest_checkpoint(last, end)
        checkpoint = 0 if resume is None else resume.end
        if self._every_page:
            checkpoint = index.deepest_with_states(last, end) if last is not None else 0
        reason = explain(index, namespace, key, last, (checkpoint, end, cap))
        branch = end if self._history is None else max(end, self._history.depth(namespace, key, cap))
        depths = end * unit, checkpoint * unit, branch * unit
        place = index.version, _is_first(last, resume, end)
        if not self.layout.tail_pages or last is None:
            return Found(*depths, reason, *place, 0, 0, namespace, key, last, walked, cap)
        page = self._shared_page(last, end, key, length)
        base = last if self._every_page else resume or index.roots[namespace]
        mid_page = self._mid_page(base, checkpoint, key, length)
        if self.layout.is_stateless and page is not None and (mid_page is None or page.tokens > mid_page.tokens):
            mid_page = page
        tokens = 0 if mid_page is None else mid_page.tokens
        parted = 0 if page is None else page.tokens
        if checkpoint * unit + tokens >= length - 1:
            reason = Reason.FULL
        elif tokens and reason is Reason.COLD:
            reason = Reason.DIVERGED
        return Found(*depths, reason, *place, tokens, parted, namespace, key, last, walked, cap, mid_page)

    def _mid_page(self, node: Node, depth: int, key: bytes, length: int) -> MidPage | None:
        """Return what tails at `depth` on the path to a node have of a prompt; None if nothing."""
        while node.end > depth and node.parent is not None:
            node = node.parent
        if node.end < depth or not node.tails:
            return None
        begin, end = depth * self.layout.unit_bytes, length * self._tails.token_bytes
        ids = key[begin : begin + self.layout.unit_bytes]
        return self._tails.longest(node, ids, is_whole=begin + len(ids) >= end)

    def _shared_page(self, last: Node, depth: int, key: bytes, length: int) -> MidPage | None:
        """Return the cached page after `depth` that has most tokens in common with a prompt; None if none has any.

        last: the node in which the walk along `key` ended, at `depth` or one unit later.
        """
        width, begin = self.layout.unit_bytes, depth * self.layout.unit_bytes
        while last.parent is not None and last.parent.end > depth:
            last = last.parent
        ids = key[begin : begin + width]
        best, most = None, 0
        for node in [last] if last.end > depth else last.neighbours(ids):
            at = begin - (node.parent.end if node.parent is not None else 0) * width
            common = common_bytes(node.edge[at : at + width], ids) // self._tails.token_bytes
            if common > most:
                best, most = node, common
        tokens = min(most, length - 1 - depth * self.layout.unit_tokens, self.layout.unit_tokens - 1)
        if best is None or best.parent is None or tokens < self.layout.min_tail_tokens:
            return None
        first = (depth - best.parent.end) * self._index.unit_pages
        return MidPage(tokens, best, page=best.pages[first : first + self._index.unit_pages])

    def _reach(self, namespace: str, key: bytes, limit: int, near: tuple[Match, int] | None) -> tuple[Node | None, int]:
        """Return the last node that `key` enters and the depth that it reaches, from where it leaves a near key."""
        if near is None:
            node: Node | None = self._index.roots.get(namespace)
        else:
            found, shared = self._fresh(near[0]), near[1] // self.layout.unit_tokens
            node = found.last
            if found.end < shared:  # that walk left the tree before the keys part
                return node, found.end
            while node is not None and node.end > shared:  # the match may have ended inside the edge of its last node
                node = node.parent
        return (None, 0) if node is None else self._index.walk(node, key, limit)

    def _fresh(self, match: Match) -> Found:
        """Return the match; StaleMatch if the index has changed since, or the match is not this cache's."""
        if not isinstance(match, Found) or match.version != self._index.version:
            raise StaleMatch(f"the match is of version {match.version} of the index, now {self._index.version}")
        return match

    def path(self, match: Match) -> Path:
        """Return the edges that a match's key enters. It is looked up again if the index has changed since."""
        if not isinstance(match, Found):
            return ()
        if match.version == self._index.version:
            nodes = self._up_to(match, match.cap)
        else:
            nodes, _ = self._index.find(match.namespace, match.key, match.cap)
        return tuple(Edge(node.serial, node.end * self.layout.unit_tokens, node.origins) for node in nodes)

    def _up_to(self, found: Found, limit: int) -> list[Node]:
        """Return the match's path, without nodes that begin at depth `limit` or deeper."""
        path = [] if found.last is None else self._index.path(found.last)
        return [node for node in path if node.parent is not None and node.parent.end < limit]

    # ---- legs

    def survey(self, draft: Draft, lease: Lease | None, match: Match | None = None) -> Survey:
        """Look a leg up: a first leg by the request's match, or by a walk if none is given.

        Raises ValueError for a draft that does not follow from the lease or names evicted content, StaleMatch for a
        match that is older than the index.
        """
        self._validate(draft, lease)
        unit = self.layout.unit_tokens
        path, end, resume = self._find(draft, lease, match)
        mid_page = None if draft.kept is None else self._kept(draft, match)
        have = {node.end * unit for node in path if node.checkpoint is not None and node.end <= end}
        shares = draft.sharing.reuse if lease is None else lease.node is not None
        wanted = shares and not self.layout.is_stateless
        saves = tuple(at for at in draft.saving.checkpoints if at not in have) if wanted else ()
        guesses = tuple(at for at in draft.saving.speculative if at not in have)
        guesses = guesses if wanted and not self._every_page else ()
        named = 0 if lease is None else len(lease.table)
        kv = self.table_pages(draft.end) - max(end * self._index.unit_pages, named)
        states = len(saves) * self.layout.checkpoint_pages
        tails = draft.saving.tails if shares and self.layout.tail_pages else ()
        if draft.slot and (lease is None or not lease.slot):
            states += self.layout.slot_pages
        return Survey(path, end, resume, saves, guesses, kv, states, mid_page, tails)

    def _kept(self, draft: Draft, match: Match | None) -> MidPage:
        """Return the content with the tokens before a start in mid-page. ValueError if there is none, or no more."""
        assert draft.kept is not None, "the leg starts in mid-page"
        unit = self.layout.unit_tokens
        length = len(draft.key) // self._tails.token_bytes
        found = match if isinstance(match, Found) else self.match(draft.namespace, draft.key, length, None)
        base, mid_page = draft.resumes_at, found.mid_page
        if base % unit or mid_page is None or (found.checkpoint_tokens, mid_page.tokens) != (base, draft.kept):
            have = found.checkpoint_tokens, found.tail_tokens
            raise ValueError(f"leg starts {draft.kept} tokens after {base}, cached are {have[1]} after {have[0]}")
        if draft.start == draft.end and not mid_page.is_whole:
            raise ValueError(f"leg computes nothing at {draft.start}, where no hidden row is cached")
        return mid_page

    def _validate(self, draft: Draft, lease: Lease | None) -> None:
        unit = self.layout.unit_tokens
        if lease is not None and lease.plan is not None:
            raise ValueError(f"request {draft.request} has plan {lease.plan} open")
        if lease is not None and draft.start != lease.end:
            raise ValueError(f"leg starts at {draft.start}, the one before ended at {lease.end}")
        if lease is None and draft.start and not draft.sharing.reuse:
            raise ValueError(f"leg starts at {draft.start} without reuse")
        if draft.start > draft.end or (draft.start == draft.end and draft.kept is None):
            raise ValueError(f"leg ends at {draft.end} and starts at {draft.start}")
        if draft.publish > draft.end or draft.publish // unit > len(draft.key) // self.layout.unit_bytes:
            raise ValueError(f"publish {draft.publish} exceeds end {draft.end} or key of {len(draft.key)} bytes")
        for at in (*draft.saving.checkpoints, *draft.saving.speculative):
            if not draft.resumes_at < at <= draft.publish or at % unit:
                within = f"({draft.resumes_at}, {draft.publish}]"
                raise ValueError(f"checkpoint at {at} is not on the grid of {unit} in {within}")
        if draft.start == draft.end and (draft.saving.checkpoints or draft.saving.speculative):
            raise ValueError(f"a leg without rows at {draft.start} saves checkpoints")
        for at in draft.saving.tails:
            if not draft.start <= at <= draft.end:
                raise ValueError(f"a tail ends at {at}, the leg computes [{draft.start}, {draft.end})")

    def _find(self, draft: Draft, lease: Lease | None, match: Match | None) -> tuple[list[Node], int, Node | None]:
        """Return the path and depth that the leg may share, and the checkpoint from which a first leg resumes."""
        unit = self.layout.unit_tokens
        if lease is None:
            if not draft.sharing.reuse:
                return [], 0, None
            limit = max(draft.start, draft.publish) // unit
            if match is None:
                path, end = self._index.find(draft.namespace, draft.key, limit)
            else:
                found = self._fresh(match)
                path, end = self._up_to(found, limit), min(found.end, limit)
            return path, end, self._resume_node(draft, path, end)
        if lease.node is None or lease.own_from < len(lease.table):  # private pages stand in between
            return [], 0, None
        last, end = self._index.walk(lease.node, draft.key, draft.publish // unit)
        return self._index.path(last, lease.node), end, None

    def _resume_node(self, draft: Draft, path: list[Node], end: int) -> Node | None:
        if not draft.start:
            return None
        start, rest = divmod(draft.resumes_at, self.layout.unit_tokens)
        if not start and not rest:
            return None
        if rest or start > end:
            raise ValueError(f"leg starts at {draft.start}, cached are {end * self.layout.unit_tokens} tokens")
        if self._every_page:
            return self._index.deepest_checkpoint(path[-1], start)
        for node in path:
            if node.end == start and node.checkpoint is not None:
                return node
        raise ValueError(f"leg starts at {draft.start}, where no checkpoint is")

    def table_pages(self, end: int) -> int:
        """Return the number of KV pages of `end` tokens."""
        return -(-end // self.layout.page_size) * self.layout.kv_pages_per_unit


def explain(index: Index, namespace: str, key: bytes, last: Node | None, reach: tuple[int, int, int]) -> Reason:
    """Return why a prompt resumes where it does and not deeper.

    last: the node in which the walk along `key` ended. reach: depths of the deepest checkpoint and of KV, and the
    greatest depth that could match, in units. Only the latest evictions are known.
    """
    checkpoint, kv, cap = reach
    if not cap:
        return Reason.TOO_SHORT
    if checkpoint == cap:
        return Reason.FULL
    if _lost_between(last, checkpoint, kv) or _dropped_at(index, namespace, key, kv):
        return Reason.EVICTED
    if checkpoint < kv:
        return Reason.NO_CHECKPOINT
    if kv:
        return Reason.DIVERGED
    root = index.roots.get(namespace)
    if root is not None and root.children:
        return Reason.COLD
    return Reason.OTHER_NAMESPACE if any(other.children for other in index.roots.values()) else Reason.COLD


def _is_first(last: Node | None, resume: Node | None, kv: int) -> bool:
    """Return whether a request is the first that leaves the tree at depth `kv`, on the edge of `last`.

    It is if there was no checkpoint, or a learned one at which no request has resumed.
    """
    if resume is not None and resume.end == kv:
        return resume.learned and not resume.hits
    return kv > 0 and not _lost_between(last, kv - 1, kv)


def _dropped_at(index: Index, namespace: str, key: bytes, position: int) -> bool:
    width = index.unit_bytes
    return (namespace, position, key[position * width : (position + 1) * width]) in index.eviction_log


def _lost_between(node: Node | None, checkpoint: int, kv: int) -> bool:
    """Return whether a checkpoint was evicted on the path to `node`, beyond `checkpoint` and at `kv` or before."""
    while node is not None and node.end > checkpoint:
        if node.lost and any(checkpoint < at <= kv for at in node.lost):
            return True
        node = node.parent
    return False
