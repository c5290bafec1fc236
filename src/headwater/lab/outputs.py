"""Rows of the lab as files: JSON, CSV or Parquet, a row a cell, with the provenance of the run."""

from __future__ import annotations

import csv
import io
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from headwater.cache_folder import write_whole
from headwater.errors import ConfigError
from headwater.lab.row import Row
from headwater.traces.request import Trace

SUFFIXES = (".csv", ".parquet", ".json")


def provenance(trace: Trace, **options: object) -> dict[str, object]:
    """Return what the figures of a run depend on: version, commit, digest of the trace, and options of the run."""
    try:
        found = version("headwater")
    except PackageNotFoundError:
        found = "not installed"
    return {"version": found, "commit": commit(), "trace": trace.name, "trace_digest": digest(trace), **options}


def commit() -> str:
    """Return the commit of a clone, with + for uncommitted changes; "" if the package is not in a clone of its own."""
    package = Path(__file__).parents[1]
    root = package.parents[1]
    if package != root / "src" / "headwater" or not (root / ".git").exists():
        return ""
    named = _git(root, "rev-parse", "--short=12", "HEAD")
    return f"{named}+" if named and _git(root, "status", "--porcelain", "--", "src") else named


def digest(trace: Trace) -> str:
    """Return a digest of all requests: lengths, times, sessions, and texts, those that requests share only once."""
    hashed, texts = blake2b(digest_size=8), dict[int, int]()
    for one in trace.requests:
        if id(one.text) not in texts:
            texts[id(one.text)] = len(texts)
            hashed.update(one.text)
        numbers = one.prompt_tokens, one.output_tokens, one.known_tokens, one.at, texts[id(one.text)]
        hashed.update(repr((one.session, one.namespace, *numbers)).encode(errors="surrogatepass"))
    return hashed.hexdigest()


def flat(row: Row) -> dict[str, Any]:
    """Return a row without nesting: `ttft_ms_p50`, `evictions_tail`, `segments_uses`. Lists become JSON."""
    return dict(_flat("", row.as_dict()))


def check_output(path: Path | None) -> None:
    """Raise ConfigError for a file of another kind, or if the library that writes it is not installed."""
    if path is None:
        return
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--out {path} ends in {path.suffix or 'nothing'!r}, must end in {', '.join(SUFFIXES)}")
    if path.suffix == ".parquet":
        _parquet()


def write_rows(path: Path, rows: Sequence[Row], run: Mapping[str, object]) -> None:
    """Write a row for each cell, whose first columns are the run. Each file is complete, or not written.

    Raises ConfigError as `check_output`.
    """
    check_output(path)
    found = [{**run, **flat(row)} for row in rows]
    names = list(dict.fromkeys(name for one in found for name in one))
    if path.suffix == ".csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
        write_whole(path, [text.getvalue()])
    elif path.suffix == ".json":
        write_whole(path, [json.dumps(found, indent=1, default=str) + "\n"])
    else:
        arrow, parquet = _parquet()
        parquet.write_table(arrow.Table.from_pylist([{name: one.get(name) for name in names} for one in found]), path)


def _parquet() -> tuple[Any, Any]:
    try:
        import pyarrow  # an extra
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ConfigError("Parquet is written by pyarrow: pip install 'headwater[parquet]'") from error
    return pyarrow, parquet


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}_", value)
        else:
            yield prefix + name, json.dumps(value) if isinstance(value, list | tuple) else value


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
