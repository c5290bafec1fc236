"""Tables of a simulated cluster: routers side by side, and the workers of each."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.lab.row import Result, Routing, Row
from headwater.table import Table

TIMES = ("mean", "p50", "p95")
COUNTS = {"more": "more", "less": "less", "lost": "lost_waiting", "gained": "gained_waiting"}


def cluster_tables(results: Sequence[Result]) -> list[Table]:
    """Return the tables of rows that have a cluster; none if there is no such row."""
    found = [(result.row, result.row.cluster) for result in results if result.row.cluster is not None]
    if not found:
        return []
    number = len(found[0][1].workers)
    routers = Table(f"{number} simulated workers", ("router",), ("hits", *(f"TTFT {name}" for name in TIMES)))
    predictions = Table("requests by the prediction of what is cached", ("router",), ("as predicted", *COUNTS))
    workers = Table("workers", ("router", "worker"), ("requests", "hits"))
    for row, routing in found:
        routers.add_row(routing.router, f"{row.token_hit_rate:.1%}", *_times(row))
        counts = (getattr(routing, name) for name in COUNTS.values())
        predictions.add_row(routing.router, f"{as_predicted(routing):.2%}", *(f"{count:,}" for count in counts))
        for at, share in enumerate(routing.workers):
            workers.add_row(routing.router, f"w{at}", f"{share.requests:,}", f"{share.token_hit_rate:.1%}")
    return [routers, predictions, workers]


def _times(row: Row) -> list[str]:
    """Return times to the first token in milliseconds."""
    return ["" if row.ttft_ms is None else f"{getattr(row.ttft_ms, name):,.0f}" for name in TIMES]


def as_predicted(routing: Routing) -> float:
    """Return the share of requests of which the worker had as much cached as predicted."""
    return routing.as_predicted / max(1, routing.as_predicted + routing.more + routing.less)
