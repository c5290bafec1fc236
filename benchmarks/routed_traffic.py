"""Traffic of the lab through real routers and workers in processes of this machine, for `routers`.

Workers serve the embedded model: their caches, events, messages and decisions are those of a cluster. Computing is
emulated: a worker sleeps as long as one alone took for as many tokens, since all of them share the processors here.
"""

from __future__ import annotations

import queue
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import cycle

import numpy as np

from benchmarks.worker_processes import PATIENCE, Workers, worker_config, workers
from headwater.cluster.router import Router
from headwater.config import ServeConfig
from headwater.engine.meter import EngineStats
from headwater.events import Event, FailedEvent, FinishedEvent, TokenEvent
from headwater.models.load import read_spec
from headwater.percentile import percentile
from headwater.request import Generation, SamplingParams
from headwater.traces.arrivals import Arrivals, TimedArrivals
from headwater.traces.request import Request, Trace

ANSWER = 32  # tokens of an answer at most: steps take time of the processors that emulated computing does not
COLD = 2048  # tokens of the prompts that one worker computes alone
COUNTED = 1.5  # seconds until a router has heard what its workers have counted


@dataclass
class Sent:
    """A request, the times of its submission and first token, and its end. Seconds of a clock."""

    request: Request
    at: float
    first: float | None = None
    end: FinishedEvent | None = None


@dataclass
class Client:
    """Clients of one trace, who ask routers in turn; a session's next request waits for its answer before."""

    trace: Trace
    arrivals: Arrivals
    routers: list[Router]
    vocabulary: int
    done: list[Sent] = field(default_factory=list)

    def run(self) -> list[Sent]:
        """Return all requests. Raises RuntimeError if one fails."""
        ended: queue.Queue[Sent | Exception] = queue.Queue()
        began, routers, n_open = time.perf_counter(), cycle(self.routers), 0
        while len(self.arrivals) or n_open:
            now, due = time.perf_counter() - began, self.arrivals.due()
            if due is not None and due <= now:
                self._submit(next(routers), Sent(self.arrivals.take(), time.perf_counter()), ended)
                n_open += 1
                continue
            try:
                sent = ended.get(timeout=PATIENCE if due is None else due - now)
            except queue.Empty:
                if due is None:
                    raise RuntimeError("no answer") from None
                continue
            if isinstance(sent, Exception):
                raise RuntimeError("a request has failed") from sent
            n_open -= 1
            self.done.append(sent)
            self.arrivals.answered(sent.request, time.perf_counter() - began)
        return self.done

    def _submit(self, router: Router, sent: Sent, ended: queue.Queue[Sent | Exception]) -> None:
        def on_event(event: Event) -> None:
            if isinstance(event, TokenEvent) and sent.first is None:
                sent.first = time.perf_counter()
            if isinstance(event, FinishedEvent):
                sent.end = event
                ended.put(sent)
            if isinstance(event, FailedEvent):
                ended.put(event.error)

        key = self.trace.key(sent.request, sent.request.prompt_tokens)
        prompt = (np.frombuffer(key, np.int32) % self.vocabulary).tolist()
        output = max(1, min(ANSWER, sent.request.output_tokens))
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        router.submit(Generation(tuple(prompt), params, sent.request.namespace), on_event)


@dataclass(frozen=True)
class Processes:
    """So many workers, with routers in front of them."""

    workers: int
    routers: int
    memory: int  # bytes of each

    @cached_property
    def token_seconds(self) -> float:
        """Seconds that one worker alone computes for a token of a cold prompt."""
        config, rng = self._config(1), random.Random(0)
        with workers(1, config, None) as running, running.routers() as (router,):
            took = []
            for _ in range(3):
                prompt = np.array(rng.choices(range(1000), k=COLD), np.int32).tobytes()
                trace = Trace("cold", [Request("0", prompt, COLD, 1, COLD)])
                (sent,) = Client(trace, TimedArrivals([(0.0, trace.requests[0])]), [router], 1000).run()
                assert sent.first is not None
                took.append(sent.first - sent.at)
        return statistics.median(took) / COLD

    def run(self, rule: str, trace: Trace, arrivals: Arrivals) -> dict[str, float]:
        """Return the figures of one run, whose workers begin with empty caches."""
        return self._figures(self._config(1), self.workers, rule, trace, arrivals, self.token_seconds)

    def one_worker(self, trace: Trace, arrivals: Arrivals) -> dict[str, float]:
        """Return the figures of one worker with the memory, the speed and the slots of all."""
        config = self._config(self.workers)
        return self._figures(config, 1, "round_robin", trace, arrivals, self.token_seconds / self.workers)

    def _config(self, times: int) -> ServeConfig:
        config = worker_config(times * self.memory)
        return replace(config, max_running=times * config.max_running)

    def _figures(
        self, config: ServeConfig, count: int, rule: str, trace: Trace, arrivals: Arrivals, token_seconds: float
    ) -> dict[str, float]:
        vocabulary = read_spec(config.model, config.dtype, config.device).vocab_size
        with ExitStack() as stack:
            running: Workers = stack.enter_context(workers(count, config, token_seconds))
            routers = stack.enter_context(running.routers(self.routers, rule))
            sent = Client(trace, arrivals, routers, vocabulary).run()
            time.sleep(COUNTED)
            counts = {name: sum(router.counts[name] for router in routers) for name in routers[0].counts}
            stats = routers[0].stats()
        return figures(sent, counts, stats)


def figures(sent: list[Sent], counts: dict[str, int], stats: EngineStats) -> dict[str, float]:
    """Return the figures that are compared, of answered requests, counts of routers, and sums of all workers."""
    times = [one.first - one.at for one in sent if one.first is not None]
    accounts = [one.end.account for one in sent if one.end is not None]
    predicted = [counts.get(f"cached_{found}", 0) for found in ("as_predicted", "less", "more")]
    unused = stats.cache.evicted_checkpoints - stats.cache.resumes  # at least: several may resume at one
    return {
        "hit_rate": sum(one.cached_tokens for one in accounts) / sum(one.prompt_tokens for one in accounts),
        "mean": statistics.fmean(times),
        "p50": percentile(times, 50),
        "p95": percentile(times, 95),
        "evicted_before_reuse": max(0, unused) / max(1, stats.cache.saved_checkpoints),
        "as_predicted": predicted[0] / max(1, sum(predicted)),
        "less": predicted[1],
        "more": predicted[2],
        "lost_waiting": counts.get("lost_waiting", 0),
        "gained_waiting": counts.get("gained_waiting", 0),
    }
