"""Output files of `headwater replay`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headwater.cache_folder import write_whole
from headwater.cli import common
from headwater.cli.replay_tables import notes
from headwater.journal import Journal
from headwater.lab.outputs import write_rows
from headwater.lab.report import write_report
from headwater.lab.row import Result
from headwater.models.profiles import Profile
from headwater.traces.request import Trace


@dataclass(frozen=True, slots=True)
class Outputs:
    """Output files of a replay, written when it ends; None for those not wanted."""

    trace: Trace
    profile: Profile
    run: dict[str, object]  # provenance
    json_file: Path | None
    per_request: Path | None
    report: Path | None
    out: Path | None
    journal: Journal  # rows of an earlier run, and those that are done

    def needed(self, result: Result) -> Result:
        """Return the result without the details that no output shows."""
        return result if self.per_request or self.report else replace(result, outcomes=(), held=(), reuse={})

    def write(self, results: Sequence[Result]) -> None:
        """Write each file completely, or not at all."""
        rows = [result.row for result in results]
        common.write_json(self.json_file, {**self.run, "rows": [row.as_dict() for row in rows]})
        if self.out is not None:
            write_rows(self.out, rows, self.run)
        if self.per_request is not None:
            write_whole(self.per_request, _lines(results))
        if self.report is not None:
            lines = (*notes(self.trace, results), common.formats_line(self.profile))
            write_report(self.report, self.trace.name, str(self.run["model"]), lines, results)


def _lines(results: Sequence[Result]) -> Iterable[str]:
    for result in results:
        row = result.row
        setup = {"memory": row.memory, "pool": row.pool, "placement": row.placement, "eviction": row.eviction}
        if not row.tails:
            setup |= {"tails": False}
        if row.segments is not None:
            setup |= {"reuse": row.segments.reuse, "segment_eviction": row.segments.eviction}
        for outcome in result.outcomes:
            yield json.dumps({**setup, **outcome.as_dict()}) + "\n"
