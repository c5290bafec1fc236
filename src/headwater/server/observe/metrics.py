"""Prometheus metrics: of requests, counted as they end, and of the engine, read at each scrape.

No label takes a value that a client could choose: values that are not in a closed list count as "other".
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headwater.account import Reason
from headwater.engine.meter import EngineStats
from headwater.schedule.tier_load import TierStats
from headwater.server.http.middleware import RequestContext
from headwater.server.observe.record import GenerationEnd, Watcher

ENDPOINTS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/embeddings": "embeddings",
    "/v1/models": "models",
    "/api/chat": "ollama_chat",
    "/api/generate": "ollama_generate",
    "/api/tags": "ollama_tags",
    "/api/show": "ollama_show",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
OUTCOMES = ("ok", "refused", "unavailable", "failed", "cancelled")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
TOKENS = (0, *(2**power for power in range(6, 19)))  # 0, and 64 to 262,144

Stats = Callable[[], EngineStats]


class Metrics(Watcher):
    """Metrics of one app, in a registry of its own."""

    def __init__(
        self,
        model: str,
        stats: Stats,
        page_bytes: int,
        formats: tuple[str, str],
        exact: Callable[[], bool] = lambda: True,
    ) -> None:
        """`formats`: data type of the computation, format of the weights. `exact`: whether hits are proven exact."""
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        count = partial(Counter, namespace="headwater", registry=registry)
        spread = partial(Histogram, namespace="headwater", registry=registry, buckets=SECONDS)
        self._requests = count("requests", "Requests that ended, by outcome", ("endpoint", "outcome"))
        self._key_requests = count("key_requests", "Requests of API keys that have names", ("key", "outcome"))
        self._key_tokens = count("key_tokens", "Tokens of their prompts, cached ones, and answers", ("key", "kind"))
        self._prompt = count("prompt_tokens", "Tokens of prompts that were answered")
        self._cached = count("cached_tokens", "Tokens of prompts that were not computed")
        self._stranded = count("stranded_tokens", "Tokens whose KV was cached beyond the deepest checkpoint")
        self._output = count("output_tokens", "Tokens of answers")
        self._hits = count("hits", "Prompts with cached tokens")
        self._misses = count("misses", "Prompts that could have resumed deeper, by reason", ("reason",))
        self._waited = count("waited_for_leader", "Prompts that waited for another request to compute the same prefix")
        self._handed = count("handed_over_tokens", "Tokens that a decoding worker loaded after another one's prefill")
        self._apart = count("segments_apart", "Cold segments that other workers than the answering one computed")
        self._ttft = spread("time_to_first_token_seconds", "From a request's arrival to its first token")
        self._queued = spread("queue_seconds", "From a request's submission until its first leg ran")
        self._gap = spread("inter_token_latency_seconds", "Between two tokens of an answer", buckets=GAPS)
        self._total = spread("request_seconds", "From a request's arrival to its answer's end")
        self._prompt_length = spread("prompt_length_tokens", "Tokens of a prompt", buckets=TOKENS)
        self._hit_length = spread("hit_length_tokens", "Tokens of a prompt that were not computed", buckets=TOKENS)
        info = Gauge("headwater_build_info", "Version and model of the server", ("version", "model"), registry=registry)
        info.labels(version("headwater"), model).set(1)
        text = "Data type of the computation, and format of the weights"
        Gauge("headwater_model_info", text, ("dtype", "weights"), registry=registry).labels(*formats).set(1)
        text = "1 if it is proven here that a hit changes no bit of an answer, else 0"
        Gauge("headwater_proven_exact", text, registry=registry).set_function(exact)
        registry.register(EngineCollector(stats, page_bytes))
        for reason in Reason:
            if reason is not Reason.FULL:
                self._misses.labels(reason)
        for endpoint in ("chat", "completion"):
            for outcome in OUTCOMES:
                self._requests.labels(endpoint, outcome)

    def token(self, gap: float) -> None:
        self._gap.observe(gap)

    def ended(self, end: GenerationEnd) -> None:
        account = end.account
        self._prompt.inc(account.prompt_tokens)
        self._cached.inc(account.cached_tokens)
        self._stranded.inc(account.stranded_tokens)
        self._output.inc(end.event.output_tokens)
        if key := end.request.key_name:
            for kind, tokens in (
                ("prompt", account.prompt_tokens),
                ("cached", account.cached_tokens),
                ("output", end.event.output_tokens),
            ):
                self._key_tokens.labels(key, kind).inc(tokens)
        self._waited.inc(account.waited_for_leader)
        if account.cached_tokens:
            self._hits.inc()
        if account.reason is not Reason.FULL:
            self._misses.labels(account.reason).inc()
        self._handed.inc(account.handed_over_tokens)
        self._apart.inc(account.segments_apart)
        self._ttft.observe(end.first_token)
        self._total.observe(end.total)
        self._prompt_length.observe(account.prompt_tokens)
        self._hit_length.observe(account.cached_tokens)
        if end.event.queued_seconds is not None:
            self._queued.observe(end.event.queued_seconds)

    def request_ended(self, request: RequestContext) -> None:
        """Count a request, answered or refused."""
        self._requests.labels(ENDPOINTS.get(request.path, "other"), outcome_of(request)).inc()
        if request.key_name:
            self._key_requests.labels(request.key_name, outcome_of(request)).inc()


def outcome_of(request: RequestContext) -> str:
    """Return one of OUTCOMES, from the context's outcome or the HTTP status."""
    if request.outcome is not None:
        return request.outcome
    if request.status is None or request.status == 499:  # nothing was sent, or the client had disconnected
        return "cancelled"
    if request.status == 503:
        return "unavailable"
    return "ok" if request.status < 400 else "refused" if request.status < 500 else "failed"


class ByModel(CollectorRegistry):
    """Metrics of several models, each with a label that names its model; those of the process come once."""

    def __init__(self, registries: Mapping[str, CollectorRegistry]) -> None:
        super().__init__()
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model, registry in self._registries.items():
            for family in registry.collect():
                if family.name.startswith("process_"):
                    families.setdefault(family.name, family)
                    continue
                new = Metric(family.name, family.documentation, family.type)
                of_all = families.setdefault(family.name, new).samples
                of_all += [one._replace(labels={**one.labels, "model": model}) for one in family.samples]
        yield from families.values()


class EngineCollector:
    """Collector that reads the engine once for each scrape."""

    def __init__(self, stats: Stats, page_bytes: int) -> None:
        self._stats, self._page_bytes = stats, page_bytes

    def describe(self) -> list[Metric]:
        """Return nothing: the engine is not read before it has started."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield from self._gauges(stats)
        yield from _totals(stats)

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        cache = stats.cache
        yield _by(GaugeMetricFamily, "pages", "Pages of the arena, by what they hold", "use", cache.pages_by_use())
        yield GaugeMetricFamily("headwater_page_bytes", "Size of a page", self._page_bytes)
        for name, text, value in (
            ("dead_kv_tokens", "Tokens of KV that no checkpoint can use", cache.dead_kv_tokens),
            ("checkpoints", "Checkpoints in the cache", cache.checkpoints),
            ("nodes", "Nodes of the index", cache.nodes),
            ("namespaces", "Namespaces with cached content or running requests", cache.namespaces),
            ("segments", "Segments in the cache", cache.segments),
            ("requests_running", "Requests that compute", stats.running),
            ("requests_waiting", "Requests that wait for a slot", stats.waiting),
            ("answers_waiting", "Finished answers that wait to be cached", stats.answers_waiting),
            ("healings_waiting", "Composed prefixes that wait for exact recomputation", stats.healings_waiting),
        ):
            yield GaugeMetricFamily(f"headwater_{name}", text, value)
        for name, text in (
            ("bytes", "Bytes that a tier holds"),
            ("parts", "Parts that a tier holds"),
            ("usable", "Whether a tier is used: 0 for a while after a failure"),
        ):
            by_tier = {label: int(getattr(tier, name)) for label, tier in labelled(stats.tiers)}
            yield _by(GaugeMetricFamily, f"tier_{name}", text, "tier", by_tier)


def _totals(stats: EngineStats) -> Iterator[Metric]:
    cache = stats.cache
    tables = (
        ("computed_tokens", "Tokens that went through the model", "kind", computed_by_kind(stats)),
        ("evictions", "Checkpoints and pages of KV evicted", "kind", cache.evictions_by_kind()),
        ("checkpoints_taken", "Checkpoints that were stored", "kind", cache.saved_by_kind()),
        ("draft_tokens", "Drafts of answers' tokens that steps verified", "outcome", stats.drafts_by_outcome()),
        ("healings", "Exact recomputations of composed prefixes, by outcome", "outcome", stats.healings_by_outcome()),
    )
    for name, text, label, values in tables:
        yield _by(CounterMetricFamily, name, text, label, values)
    yield _tier_work(stats)
    pulled = next(filter(None, (tier.pulled_by_way() for tier in stats.tiers)), {})
    yield _by(CounterMetricFamily, "pulled_bytes", "Bytes that were pulled from other workers", "way", pulled)
    for name, text, value in (
        ("checkpoints_evicted_unused", "Checkpoints evicted before a request resumed there", cache.evicted_unused),
        ("resumes", "Requests that resumed at a checkpoint", cache.resumes),
        ("resumed_tokens", "Tokens that resumed requests did not compute", cache.resumed_tokens),
        ("segment_uses", "Segments from which requests were composed", cache.segment_uses),
        ("loaded_tokens", "Tokens that were read from tiers", stats.loaded_tokens),
        ("loaded_segments", "Segments that were read from tiers", stats.loaded_segments),
        ("copies_dropped", "Copies to tiers that were abandoned", stats.copies_dropped),
        ("preemptions", "Requests that were preempted", stats.preemptions),
        ("refused", "Requests refused by a full queue", stats.refused),
        ("expired", "Requests that passed their deadline", stats.expired),
        ("steps", "Steps of the engine", stats.steps),
        ("failed_steps", "Steps that raised", stats.failed_steps),
        ("step_seconds", "Time spent in steps", stats.step_seconds),
        ("thread_restarts", "Threads that began again after an error", stats.thread_restarts),
    ):
        yield CounterMetricFamily(f"headwater_{name}", text, value)


def _tier_work(stats: EngineStats) -> Metric:
    metric = CounterMetricFamily("headwater_tier_work", "Parts of tiers, by kind of work", labels=["tier", "work"])
    for label, tier in labelled(stats.tiers):
        for work, parts in tier.parts_by_work().items():
            metric.add_metric([label, work], parts)
    return metric


def labelled(tiers: Sequence[TierStats]) -> Iterator[tuple[str, TierStats]]:
    """Yield each tier with its label: its kind, and a number if others of that kind come before it."""
    seen = collections.Counter[str]()
    for tier in tiers:
        seen[tier.kind] += 1
        yield tier.kind if seen[tier.kind] == 1 else f"{tier.kind} {seen[tier.kind]}", tier


def computed_by_kind(stats: EngineStats) -> dict[str, int]:
    """Return the tokens that went through the model, by kind of work."""
    return {
        "prefill": stats.prefill_tokens,
        "answer": stats.answer_tokens,
        "segment": stats.segment_tokens,
        "healing": stats.healing_tokens,
        "decode": stats.decode_tokens,
    }


def _by(family: type[Metric], name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    metric = family(f"headwater_{name}", text, labels=[label])  # type: ignore[call-arg]
    for key, value in values.items():
        metric.add_metric([key], value)  # type: ignore[attr-defined]
    return metric
