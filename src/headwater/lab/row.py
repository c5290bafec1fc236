"""One row of the lab's table, with the details that a report draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from headwater.lab.setup import Cluster
from headwater.lab.tally import Held, Outcome
from headwater.percentile import percentile
from headwater.setting import OFF


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of times to the first token, in milliseconds."""

    mean: float  # milliseconds, as the others
    p5: float  # percentile
    p50: float  # percentile
    p95: float  # percentile
    p99: float  # percentile

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread | None:
        """Return the spread of times in seconds, with interpolated percentiles; None if there are none."""
        if not seconds:
            return None
        ordered = sorted(1000 * value for value in seconds)
        at = [percentile(ordered, percent) for percent in (5, 50, 95, 99)]
        return cls(*(round(value, 3) for value in (sum(ordered) / len(ordered), *at)))


@dataclass(frozen=True, slots=True)
class Segments:
    """Reuse of segments, for prompts made of them. Tokens, bytes."""

    reuse: str  # prefix, segments, both
    eviction: str  # policy of segments
    prefix_tokens: int  # at which requests resumed
    composed_tokens: int  # of stored segments, not computed
    seam_tokens: int  # of those segments, recomputed
    made_tokens: int  # computed to build stored segments
    uses: int  # how often a request was composed of one
    stored: int  # at the end, as the next
    bytes: int  # of stored segments
    evicted: int  # segments

    @property
    def name(self) -> str:
        """Name of the kinds of reuse and the eviction of segments."""
        return self.reuse if self.reuse == "prefix" else f"{self.reuse}, {self.eviction}"


@dataclass(frozen=True, slots=True)
class Share:
    """Requests of one simulated worker, and the share of their prompt tokens that was not computed."""

    requests: int
    token_hit_rate: float


@dataclass(frozen=True, slots=True)
class Routing:
    """Outcome of a router's rule over simulated workers.

    A prediction is the router's: how many tokens of a prompt the chosen worker has cached. It is compared with the
    worker's match at the time of arrival; changes of that match until the prefill begins are counted apart. Requests.
    """

    router: str  # rule, as spelled
    event_delay: float  # seconds
    workers: tuple[Share, ...]  # requests and hit rate of each
    as_predicted: int  # requests
    more: int  # tokens were cached than predicted
    less: int  # tokens were cached than predicted
    lost_waiting: int  # less was cached when the prefill began than at the time of arrival
    gained_waiting: int  # more was cached then
    expected_loads: int = 0  # requests whose worker was expected to load a part from its store
    loaded: int = 0  # requests whose worker did, expected or not
    missed_loads: int = 0  # expected loads that did not happen
    network: str = OFF  # over which prefixes are pulled, as given
    pulled: int = 0  # prefixes
    followed: int = 0  # prefixes that were read while another worker prefilled them
    pulls_failed: int = 0  # since the prefix was evicted before it was sent
    prefill: int = 0  # workers that only prefill; `workers` counts requests where they were prefilled
    handed_over: int = 0  # prefixes, to workers that decode
    answers_apart: int = 0  # handed-over answers that are prefilled where their prompts were
    combined: int = 0  # requests whose segments workers prepared for another one
    segments_apart: int = 0  # their cold segments that another worker than the combining one computed
    failures: str = OFF  # rate of workers' failures, as given
    failed: int = 0  # workers
    replaced: int = 0  # failed workers that another one replaced, which is in `workers`, too
    given_up: int = 0  # requests that got an error after the most attempts
    resumed: int = 0  # answers that continued on another worker after a failure
    moved: int = 0  # requests without a first token that moved to another worker after a failure

    @classmethod
    def of(cls, cluster: Cluster, counts: Mapping[str, int], workers: Sequence[Share], **pulls: int) -> Routing:
        """Return the outcome from counts by name. `pulls`: counts of prefixes that workers read from each other."""
        given: dict[str, Any] = pulls | {
            "router": cluster.router,
            "event_delay": cluster.event_delay,
            "network": OFF if cluster.network is None else str(cluster.network),
            "prefill": cluster.prefill,
            "failures": OFF if cluster.failures is None else str(cluster.failures),
            "replaced": len(workers) - cluster.workers,
            "workers": tuple(workers),
        }
        given |= {one.name: counts[one.name] for one in fields(cls) if one.name not in given}
        return cls(**given)


@dataclass(frozen=True, slots=True)
class Row:
    """Outcome of one setup on one trace. Bytes, tokens, FLOPs, seconds, MB of 10^6 bytes."""

    memory: int  # bytes
    pool: str  # unified, split, elastic
    placement: str  # policy, as spelled
    eviction: str  # policy, as spelled
    requests: int  # number
    prompt_tokens: int  # of all requests
    hit_tokens: int  # not computed: prefixes and composed ones, less those computed to build segments
    token_hit_rate: float  # tokens that were not computed, of all prompt tokens
    ideal_hit_rate: float  # the same with endless memory and a checkpoint at every unit
    stranded_tokens: int  # cached beyond the deepest checkpoint, of all matches
    flops_saved: float  # of prefill, by hits
    flops_saved_share: float  # of the FLOPs of all prompts
    checkpoints_taken: int  # number stored
    checkpoints_hit: int  # those at which a request resumed
    evictions: dict[str, int]
    misses_by_reason: dict[str, int]
    ttft_ms: Spread | None  # None: without --serve nothing takes time
    queue_depth: float | None  # requests that wait, on average; None without --serve
    alpha: float | None  # of a FLOP-aware policy, at the end
    seconds: float  # of the replay, without reading and tokenising
    peak_rss_mb: float  # of the process
    segments: Segments | None = None  # None: no request has any
    speculation: str = OFF  # as it was asked for
    tpot_ms: Spread | None = None  # time of an output token after the first; None without --serve
    accepted_drafts: int = 0  # tokens
    rejected_drafts: int = 0  # tokens
    tier: str = OFF  # as it was asked for
    loaded_tokens: int = 0  # read from the tier, not computed
    tier_peak_bytes: int = 0  # that the tier held at most
    tier_written_bytes: int = 0  # to the tier
    hints: str = OFF  # that requests carried, as `--hints` spells them
    high_hit_rate: float | None = None  # token hit rate of requests of high priority; None: there are none
    cluster: Routing | None = None  # None: one worker without a router
    tails: bool = False  # whether requests could resume in mid-page
    reported_hit_rate: float | None = None  # of the recording's own provider; None: not recorded
    recomputed_tokens: int = 0  # computed although sent before, in the page where a prompt parts; 0 in recorded blocks

    @property
    def reuse(self) -> str:
        """Kinds of content that prompts made of segments reuse, and the eviction of segments; "" without segments."""
        return "" if self.segments is None else self.segments.name

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Result:
    """A row, and the details of its requests and its memory."""

    row: Row
    outcomes: tuple[Outcome, ...]
    held: tuple[Held, ...]
    page_bytes: int
    reuse: dict[int, int]  # checkpoints by the number of requests that resumed there
