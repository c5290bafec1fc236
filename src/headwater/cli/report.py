"""`headwater report`: a day's hits, misses by reason with the remedy, and memory that would have paid."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from typer import Option

from headwater.account import Reason
from headwater.cache_folder import write_whole
from headwater.cli import common
from headwater.cli.models import profile_for
from headwater.errors import ConfigError, HeadwaterError
from headwater.lab.replay import replay
from headwater.lab.report.day import Day, page
from headwater.lab.setup import Setup
from headwater.lab.size import Sampling, Sizing, advice, curve
from headwater.load.endpoint import headers, trusted
from headwater.machine import in_units
from headwater.setting import parse_bytes
from headwater.table import Table
from headwater.traces.loads import make_arrivals
from headwater.traces.read import served_by
from headwater.traces.request import Trace

TIMEOUT_SECONDS = 30.0
SIZES = 8  # points of the curve of hit rate over memory
SAMPLE = re.compile(r"^(headwater_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')
ANSWERED = 'headwater_requests_total{outcome="ok"}'
MISSED = "headwater_misses_total"

Sums = Callable[[str, str], dict[str, int]]  # of a selector, by the values of a label; "" for no label


class MetricsError(HeadwaterError):
    """Metrics cannot be read; the message has the address."""


@common.commands.command()
def report(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="URL of Prometheus or of a server, or a file of `serve --record`.")
    ],
    day: Annotated[
        str | None,
        Option(help="A date in UTC. [default: yesterday; of a file all, of a server since its start]"),
    ] = None,
    memory: Annotated[str, Option(help="For a file: --memory of the server.")] = "4GB",
    html: Annotated[Path | None, Option(help="Write one self-contained HTML page to this file, too.")] = None,
    api_key: common.ApiKey = None,
    jobs: common.Jobs = 0,
) -> None:
    """Report a day's hits and misses, and memory that would pay.

    Misses have a reason and a remedy. A recording is replayed with the server's code, at the server's memory and at
    others.
    """
    common.prepare_outputs(html)
    start = None if day is None else parsed_day(day)
    if source.startswith(("http://", "https://")):
        found = of_metrics(source.rstrip("/"), start, api_key)
    else:
        found = of_recording(source, start, parse_bytes(memory), jobs)
    cached = f"{found.cached_tokens:,} of {found.prompt_tokens:,} prompt tokens from the cache ({found.hit_rate:.1%})"
    common.show(f"{found.period}: {found.requests:,} requests", cached)
    if found.rows:
        common.show(misses_table(found))
    for line in found.memory:
        common.console.print(line, markup=False, highlight=False)
    if html is not None:
        write_whole(html, [page(found)])


def parsed_day(text: str) -> datetime:
    """Return the start of a day in UTC. Raises ConfigError."""
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError as error:
        raise ConfigError(f"day is {text!r}, must be a date such as {datetime.now(UTC):%Y-%m-%d}") from error


def misses_table(day: Day) -> Table:
    table = Table("misses", ("reason",), ("prompts", "of requests"), ("remedy",))
    for reason, prompts, share, remedy in day.rows:
        table.add_row(reason, f"{prompts:,}", f"{share:.1%}", remedy)
    return table


def of_metrics(url: str, start: datetime | None, api_key: str | None) -> Day:
    """Return a day by Prometheus, or by the /metrics page of a server. Raises MetricsError."""
    begin = start or datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=1)
    with httpx.Client(headers=headers(api_key), timeout=TIMEOUT_SECONDS, trust_env=False, verify=trusted()) as client:
        sums: Sums
        if url.endswith("/metrics") or not is_prometheus(client, url):
            if start is not None:
                raise ConfigError(f"--day {start:%Y-%m-%d}: {url} is a server, which counts since its start")
            text = answered(client, url if url.endswith("/metrics") else f"{url}/metrics").text
            period, sums = "since the server's start", partial(sums_of_page, text)
        else:
            period, end = f"{begin:%Y-%m-%d}", begin + timedelta(days=1)
            sums = partial(sums_of_prometheus, client, url, end)
        misses = sums(MISSED, "reason")
        names = (ANSWERED, "headwater_prompt_tokens_total", "headwater_cached_tokens_total")
        requests, prompt, cached = (sums(name, "").get("", 0) for name in names)
    if not prompt:
        raise MetricsError(f"{url} has no prompt tokens of a Headwater server, {period}")
    return Day(url, period, requests, prompt, cached, misses, advice_without_recording(misses))


def advice_without_recording(misses: dict[str, int]) -> tuple[str, ...]:
    """Return a sentence about memory: metrics have no prefixes, so the lab cannot replay them."""
    lost = sum(misses.get(reason, 0) for reason in (Reason.EVICTED, Reason.NO_MEMORY))
    if not lost:
        return ("No prompt missed for want of memory: more would not have paid.",)
    how = "record traffic (`serve --record FILE`), then `headwater report FILE` tells how much"
    return (f"{lost:,} prompts missed for want of memory: {how}.",)


def is_prometheus(client: httpx.Client, url: str) -> bool:
    """Return whether Prometheus answers at this address. Raises MetricsError if nothing does."""
    try:
        return client.get(f"{url}/api/v1/query", params={"query": "vector(1)"}).is_success
    except httpx.HTTPError as error:
        raise MetricsError(f"{url} cannot be read: {error}") from error


def answered(client: httpx.Client, url: str, **parameters: str) -> httpx.Response:
    """Return the answer to a request. Raises MetricsError."""
    try:
        return client.get(url, params=parameters).raise_for_status()
    except httpx.HTTPError as error:
        raise MetricsError(f"{url} cannot be read: {error}") from error


def sums_of_prometheus(client: httpx.Client, url: str, end: datetime, selector: str, label: str) -> dict[str, int]:
    """Return the increase of a metric in the day before `end`, over all servers, by the values of a label."""
    by = f" by ({label})" if label else ""
    query = f"sum{by} (increase({selector}[1d]))"
    response = answered(client, f"{url}/api/v1/query", query=query, time=str(end.timestamp()))
    try:
        series: list[Any] = response.json()["data"]["result"]
        return {str(one["metric"].get(label, "")): round(float(one["value"][1])) for one in series}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise MetricsError(f"{url} answers {query} in another form than Prometheus: {error!r}") from error


def sums_of_page(text: str, selector: str, label: str) -> dict[str, int]:
    """Return the sums of a metric's samples by the values of a label."""
    name, _, wanted = selector.partition("{")
    sums = Counter[str]()
    for found, labels, value in SAMPLE.findall(text):
        pairs = dict(LABEL.findall(labels))
        if found == name and set(LABEL.findall(wanted)) <= pairs.items():
            sums[pairs.get(label, "")] += round(float(value))
    return dict(sums)


def of_recording(source: str, start: datetime | None, memory: int, jobs: int) -> Day:
    """Replay a recording with the server's policies, at its memory and at others. Raises ConfigError, TraceError."""
    recorded = served_by(source, None)
    if recorded is None:
        raise ConfigError(f"{source} is not a recording of `headwater serve --record`")
    trace = common.read(source, None, None, None, 0)
    if start is not None:
        trace = of_day(trace, start)
    placement, eviction = common.policies_for(None, None, recorded)
    setup = Setup(
        profile_for(None, recorded), memory, placement, eviction, page_size=recorded.page_size, reuse="prefix"
    )
    arrivals = partial(make_arrivals, spelling=None, seed=0, data=None)
    with common.progress_console.status("replaying"):
        row = replay(trace, setup, arrivals(trace)).row
        sizing = Sizing(trace, setup, arrivals(trace), Sampling(jobs=jobs))
        low, high = sizing.range()
        sizes = sizing.sizes([int(low * (high / low) ** (n / (SIZES - 1))) for n in range(SIZES)])
    sentences = advice(curve(sizes, sizing.modelled), sizing.ideal)
    ideal = f"endless memory {row.ideal_hit_rate:.1%}"
    own = f"{in_units(memory)} saves {row.token_hit_rate:.1%} of the prompt tokens, {ideal}."
    period = f"{start:%Y-%m-%d}" if start is not None else "the recording"
    return Day(
        Path(source).name, period, row.requests, row.prompt_tokens, row.hit_tokens, row.misses_by_reason,
        (own, *sentences),
    )  # fmt: skip


def of_day(trace: Trace, start: datetime) -> Trace:
    """Return the requests of one day. Raises ConfigError if there are none."""
    end = start + timedelta(days=1)
    times = [request.at or 0.0 for request in trace.requests]
    chosen = [one for one, at in zip(trace.requests, times, strict=True) if start.timestamp() <= at < end.timestamp()]
    if not chosen:
        first, last = (datetime.fromtimestamp(at, UTC) for at in (min(times), max(times)))
        raise ConfigError(f"no request of {start:%Y-%m-%d}: the recording has {first:%Y-%m-%d} to {last:%Y-%m-%d}")
    return replace(trace, requests=tuple(chosen))
