"""What is asked for later, as far as a cache needs to know it. Depths in units, requests by their number from 0."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from headwater.cache.index import Index
from headwater.cache.node import Node


class Asked(NamedTuple):
    """A request: what will be cached of it, and how much of that is looked up."""

    namespace: str
    key: bytes  # prompt, and answer as far as it is cached; whole units count
    lookup: int  # units that a match of the prompt may have: (prompt tokens - 1) // unit


@dataclass(frozen=True, slots=True)
class Profile:
    """Who comes next along one request's key: up to `depths[k]` it is `users[k]`. Both ascend."""

    depths: array[int]
    users: array[int]

    def next(self, depth: int) -> int | None:
        """The first later request whose lookup shares the key's first `depth` units; None: none does."""
        at = bisect_left(self.depths, depth)
        return self.users[at] if at < len(self.users) else None


class Future:
    """A profile of each request, found by walking the requests backwards over a trie of what is looked up."""

    def __init__(self, unit_bytes: int, last_to_first: Iterable[Asked]) -> None:
        self._trie = Index(unit_bytes, 0, _Nobody())
        self._user: dict[Node, int] = {}  # who passes the node first, of those that were walked so far
        passed = [self._pass(back, asked) for back, asked in enumerate(last_to_first)]
        for profile in passed:
            for at, back in enumerate(profile.users):
                profile.users[at] = len(passed) - 1 - back
        self.profiles = passed[::-1]
        self._user.clear()
        self._trie.roots.clear()

    def _pass(self, back: int, asked: Asked) -> Profile:
        """Note the profile of the request that is the `back`-th from the end, then its own lookup."""
        trie, user = self._trie, self._user
        root = trie.root(asked.namespace)
        last, end = trie.walk(root, asked.key, len(asked.key) // trie.unit_bytes)
        depths, users = array("q"), array("q")
        for node in trie.path(last):
            if users and users[-1] == user[node]:
                depths[-1] = min(node.end, end)
            else:
                depths.append(min(node.end, end))
                users.append(user[node])
        if end > asked.lookup:
            last, end = trie.walk(root, asked.key, asked.lookup)
        if last.end > end:
            lower, last = last, trie.boundary(last, end)
            user[last] = user[lower]
        if end < asked.lookup:
            last = trie.add(last, asked.key, asked.lookup, array("i"))
        for node in trie.path(last):
            user[node] = back
        return Profile(depths, users)


class _Nobody:
    def changed(self, node: Node) -> None:
        """Nothing is evicted from the future."""

    def touched(self, node: Node) -> None:
        """Nor has it times."""
