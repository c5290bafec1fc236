"""Next uses of checkpoints in a trace that is known in advance. Depths in units, requests by their number from 0."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from headwater.cache.index import Index
from headwater.cache.node import Node

MAX_SKIPPED_REQUESTS = 256  # that deeper checkpoints serve; then the last of them counts


class Asked(NamedTuple):
    """A future request: the part of it that is cached, and the part that is looked up."""

    namespace: str
    key: bytes  # prompt, and the cached part of the answer; whole units count
    lookup: int  # units that a match of the prompt may have: (prompt tokens - 1) // unit


@dataclass(frozen=True, slots=True)
class Profile:
    """Next users along one request's key: up to `depths[k]` it is request `users[k]`. Both ascend."""

    depths: array[int]
    users: array[int]

    def next(self, depth: int) -> int | None:
        """Return the first later request whose lookup shares the key's first `depth` units; None if none does."""
        at = bisect_left(self.depths, depth)
        return self.users[at] if at < len(self.users) else None


class Future:
    """A profile of each request, found by walking the requests backwards over a trie of their lookups."""

    def __init__(self, unit_bytes: int, last_to_first: Iterable[Asked]) -> None:
        self._trie = Index(unit_bytes, 0)
        self._user: dict[Node, int] = {}  # the first request, of those walked so far, that passes the node
        passed = [self._pass(back, asked) for back, asked in enumerate(last_to_first)]
        for profile in passed:
            for at, back in enumerate(profile.users):
                profile.users[at] = len(passed) - 1 - back
        self.profiles = passed[::-1]
        self._user.clear()
        self._trie.roots.clear()

    def _pass(self, back: int, asked: Asked) -> Profile:
        """Return the profile of the request that is the `back`-th from the end, then add its own lookup."""
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


class Users:
    """The next request to resume at each checkpoint. A request resumes at the deepest checkpoint that it passes.

    At most one checkpoint serves a request.
    """

    def __init__(self, future: Future | None = None) -> None:
        self._profiles = [] if future is None else future.profiles
        self._user: dict[Node, int | None] = {}
        self._server: dict[int, Node] = {}
        self.now = 0

    def knows(self, node: Node) -> bool:
        """Return whether the checkpoint's next user, or that there is none, is known and still to come."""
        return node in self._user and ((user := self._user[node]) is None or user > self.now)

    def of(self, node: Node) -> int | None:
        """Return the checkpoint's next user."""
        return self._user.get(node)

    def begin(self, request: int) -> list[Node]:
        """End all requests before `request`. Returns the checkpoints whose next user changed."""
        moved: list[Node] = []
        for over in range(self.now, request):
            if (node := self._server.get(over)) is not None:
                moved += self._assign(node, self._next(over, node))
        self.now = request
        return moved

    def enter(self, node: Node) -> list[Node]:
        """Add a checkpoint that the current request left at `node`. Returns the checkpoints whose next user changed."""
        return self._assign(node, self._next(self.now, node))

    def leave(self, node: Node) -> list[Node]:
        """Remove a checkpoint. Returns the ancestor that serves its user in its place, if one does."""
        user = self._user.pop(node, None)
        if user is None or self._server.get(user) is not node:
            return []
        del self._server[user]
        climb = node.parent
        while climb is not None and climb not in self._user:
            climb = climb.parent
        if climb is None or ((later := self._user[climb]) is not None and later <= user):
            return []
        self._set(climb, user)
        return [climb]

    def _assign(self, node: Node, user: int | None) -> list[Node]:
        """Let `node` serve `user`, or the first request after it that no deeper checkpoint serves."""
        moved = [node]
        for _ in range(MAX_SKIPPED_REQUESTS):
            other = None if user is None else self._server.get(user)
            if user is None or other is None or other is node:
                break
            if other.end < node.end:
                del self._server[user]
                self._set(node, user)
                node, other = other, node
                moved.append(node)
            user = self._beyond(user, node, other)
        self._set(node, user)
        return moved

    def _beyond(self, user: int, node: Node, deeper: Node) -> int | None:
        """Return the first request after `user` that passes `node` and not `deeper`."""
        for _ in range(MAX_SKIPPED_REQUESTS):
            following = self._next(user, node)
            if following is None or following != self._next(user, deeper):
                return following
            user = following
        return user

    def _next(self, request: int, node: Node) -> int | None:
        """Return the next request that passes `node`, which is on the key of `request`."""
        return self._profiles[request].next(node.end) if request < len(self._profiles) else None

    def _set(self, node: Node, user: int | None) -> None:
        before = self._user.get(node)
        if before is not None and self._server.get(before) is node:
            del self._server[before]
        self._user[node] = user
        if user is not None:
            self._server.setdefault(user, node)
