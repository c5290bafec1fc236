"""The placement problem solved slowly: over all sets, by the recurrence as it stands, and by a hull of lines."""

from collections import deque
from itertools import combinations

Law = dict[int, int]  # depth in tokens -> weight


def cost_of(positions: tuple[int, ...], law: Law) -> int:
    """Tokens that all of the law's requests recompute."""
    return sum(weight * (depth - max([0, *(c for c in positions if c <= depth)])) for depth, weight in law.items())


def over_all_sets(law: Law, k: int, grid: int = 1) -> int:
    """The least cost of any k positions on the grid."""
    places = range(grid, max(law, default=0) + 1, grid)
    return min(cost_of(chosen, law) for chosen in combinations(places, min(k, len(places))))


def by_recurrence(law: Law, k: int) -> int:
    """Theorem 2's recurrence over all depths 1..N, O(N²k)."""
    n = max(law)
    below, moment = _prefix_sums(law, n)
    cost = moment
    for _ in range(k):
        before = cost
        cost = [0] + [
            min(
                before[j - 1] + moment[end] - moment[j - 1] - j * (below[end] - below[j - 1]) for j in range(1, end + 1)
            )
            for end in range(1, n + 1)
        ]
    return cost[n]


def by_hull_trick(law: Law, k: int) -> int:
    """The same in O(Nk): slopes −j fall and places P(n) do not, so lines leave a queue at its head, for good."""
    n = max(law)
    below, moment = _prefix_sums(law, n)
    cost = moment
    for _ in range(k):
        before, cost, lines = cost, [0], deque[tuple[int, int]]()
        for end in range(1, n + 1):
            line = (-end, before[end - 1] - moment[end - 1] + end * below[end - 1])
            while len(lines) > 1 and _is_hidden(lines[-2], lines[-1], line):
                lines.pop()
            lines.append(line)
            while len(lines) > 1 and _at(lines[1], below[end]) <= _at(lines[0], below[end]):
                lines.popleft()
            cost.append(moment[end] + _at(lines[0], below[end]))
    return cost[n]


def _prefix_sums(law: Law, n: int) -> tuple[list[int], list[int]]:
    below, moment = [0], [0]
    for depth in range(1, n + 1):
        below.append(below[-1] + law.get(depth, 0))
        moment.append(moment[-1] + depth * law.get(depth, 0))
    return below, moment


def _at(line: tuple[int, int], place: int) -> int:
    return line[0] * place + line[1]


def _is_hidden(left: tuple[int, int], middle: tuple[int, int], right: tuple[int, int]) -> bool:
    """Return whether the middle line is nowhere lower than both others; slopes fall."""
    return (right[1] - left[1]) * (left[0] - middle[0]) <= (middle[1] - left[1]) * (left[0] - right[0])
