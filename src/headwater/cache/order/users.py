"""Who will resume at which checkpoint: of those that a request passes, at the deepest."""

from __future__ import annotations

from headwater.cache.node import Node
from headwater.cache.order.future import Future

HOPS = 256  # requests that a checkpoint is looked past for one that it serves itself; then it counts as serving that


class Users:
    """Each checkpoint's next user, kept right as checkpoints come and go. At most one checkpoint serves a request."""

    def __init__(self, future: Future | None = None) -> None:
        self._profiles = [] if future is None else future.profiles
        self._user: dict[Node, int | None] = {}
        self._server: dict[int, Node] = {}
        self.now = 0

    def knows(self, node: Node) -> bool:
        """Whether it is known who comes next to the checkpoint."""
        return node in self._user and ((user := self._user[node]) is None or user > self.now)

    def of(self, node: Node) -> int | None:
        return self._user.get(node)

    def begin(self, request: int) -> list[Node]:
        """All requests before `request` are over. Returns the checkpoints that have other users now."""
        moved: list[Node] = []
        for over in range(self.now, request):
            if (node := self._server.get(over)) is not None:
                moved += self._assign(node, self._next(over, node))
        self.now = request
        return moved

    def enter(self, node: Node) -> list[Node]:
        """The current request left a checkpoint at `node`. Returns it and whom it takes a user from."""
        return self._assign(node, self._next(self.now, node))

    def leave(self, node: Node) -> list[Node]:
        """The checkpoint is gone. Returns the ancestor that serves its user in its place, if one does."""
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
        """Let `node` serve `user`, or the first after it whom no deeper checkpoint serves."""
        moved = [node]
        for _ in range(HOPS):
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
        """The first after `user` who passes `node` and not `deeper`."""
        for _ in range(HOPS):
            following = self._next(user, node)
            if following is None or following != self._next(user, deeper):
                return following
            user = following
        return user

    def _next(self, request: int, node: Node) -> int | None:
        """Who comes next to `node`, which is on the key of `request`."""
        return self._profiles[request].next(node.end) if request < len(self._profiles) else None

    def _set(self, node: Node, user: int | None) -> None:
        before = self._user.get(node)
        if before is not None and self._server.get(before) is node:
            del self._server[before]
        self._user[node] = user
        if user is not None:
            self._server.setdefault(user, node)
