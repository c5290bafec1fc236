"""Policies in the running server, over HTTP, beside what the lab predicts for exactly that: `make served-policies`.

    python -m benchmarks.served_policies [--repeats 3] [--requests 300] [--data FOLDER] [--small]

Sends the same recorded agents' requests, whose histories collapse and whose prompts are cut, at the same times to
`headwater serve` with a small checkpoint, under each policy in turns; another seed in each repetition. Memory is what
LRU needs for half of the ideal hits, and requests arrive, whether or not earlier ones were answered, at a rate that
keeps the device busy for a given share of the time under LRU. Both follow from the lab with a device that is fitted
first, to requests one by one. Weights are random and answers have a fixed length.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks import measure
from benchmarks.engines import bench_checkpoint
from benchmarks.measure import Row
from benchmarks.served_cells import seconds
from benchmarks.servers import serve
from headwater.lab.cost import StepCost, load_device
from headwater.lab.fit import Point, fit, observe
from headwater.lab.replay import replay
from headwater.lab.row import Result as Predicted
from headwater.lab.serving import Engine
from headwater.lab.setup import Setup
from headwater.load.endpoint import Endpoint
from headwater.load.generator import Limits, Load
from headwater.load.results import Result
from headwater.load.session import Call, Session, Turn
from headwater.models.load import read_spec
from headwater.models.profiles import profile_of
from headwater.traces.arrivals import Open, TimedArrivals, in_order
from headwater.traces.read import make_trace
from headwater.traces.request import Request

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
HISTORIES = "collapsed('mini_swe_agent', last=5, turns=12)"  # as SWE-agent's history processor prompts
TURNS = 12
POLICIES = {name: ("branch", name) for name in ("lru", "marconi", "seglen", "gdsf")} | {
    "headwater": ("headwater", "headwater")
}
MAX_PROMPT, ANSWER = 4096, 32  # tokens
LOAD = 0.7  # share of the time that the device is busy under LRU
HITS = 0.5  # of the ideal ones, under LRU
MAX_RUNNING, TOKENS_PER_STEP = 8, 1024
FIT_REPEATS, WARM_TOKENS = 3, 64
ANSWER_SECONDS = 600.0
AMPLE_MEMORY = 8 * 10**9
FIELDS = {"temperature": 0.0, "ignore_eos": True}
SMALL_REQUESTS, SMALL_PROMPT = 24, 512


@dataclass(frozen=True, slots=True)
class Run:
    """One policy's requests in one repetition: measured in the server, and predicted."""

    results: list[Result]
    predicted: Predicted

    def hits(self) -> float:
        """Return the percentage of prompt tokens that were not computed."""
        return 100 * sum(one.resumed_at or 0 for one in self.results) / self._prompt_tokens()

    def ttfts(self) -> list[float]:
        """Return milliseconds from when each request was due to its first token."""
        return [1e3 * (one.sent - one.due + one.ttft) for one in self.results if one.ttft is not None]

    def throughput(self) -> float:
        """Return prompt tokens a second, cached ones included."""
        return self._prompt_tokens() / max(one.ended for one in self.results)

    def hits_error(self) -> float:
        """Return by how many points the lab's hits are above the server's."""
        return 100 * self.predicted.row.token_hit_rate - self.hits()

    def mean_ratio(self) -> float:
        """Return the lab's mean TTFT over the server's."""
        assert self.predicted.row.ttft_ms is not None, "a run under a clock has times"
        return self.predicted.row.ttft_ms.mean / fmean(self.ttfts())

    def _prompt_tokens(self) -> int:
        return sum(one.prompt_tokens or 0 for one in self.results)


FIGURES: dict[str, tuple[str, Callable[[Run], float]]] = {
    "hits": ("%", Run.hits),
    "mean TTFT": ("ms", lambda run: fmean(run.ttfts())),
    **{f"p{p} TTFT": ("ms", lambda run, p=p: float(np.percentile(run.ttfts(), p))) for p in (50, 95, 99)},
    "throughput": ("tokens/s", Run.throughput),
    "hits, lab's distance": ("points", lambda run: abs(run.hits_error())),
    "mean TTFT, lab's distance": ("%", lambda run: 100 * abs(run.mean_ratio() - 1)),
}
GOALS = {"hits, lab's distance": "<= 0.5", "mean TTFT, lab's distance": "<= 15"}


class Bench:
    """The traffic, the device that was fitted to this machine, and the memory and rate that follow."""

    def __init__(self, folder: Path, given: argparse.Namespace) -> None:
        self._folder, self._threads, self._seed, self._repeats = folder, given.threads, given.seed, given.repeats
        spec, max_prompt = read_spec(folder), SMALL_PROMPT if given.small else MAX_PROMPT
        self._profile, n_requests = profile_of(spec, folder), SMALL_REQUESTS if given.small else given.requests
        whole = make_trace(HISTORIES, given.data, limit=-(-n_requests // TURNS))
        requests = tuple(cut(one, max_prompt, spec.vocab_size) for one in islice(whole.requests, n_requests))
        self._trace = replace(whole, requests=requests)
        self._cost = self._fitted(max_prompt, spec.vocab_size)
        self._memory, lru = self._short_memory()
        self._rate = LOAD / fmean(seconds(one, self._cost) for one in lru.outcomes)
        self.settings = {
            "traffic": f"{len(requests)} requests of {HISTORIES}, at most {max_prompt:,} tokens, {ANSWER} answered",
            "memory": self._memory,
            "requests_per_second": round(self._rate, 3),
            "device": asdict(self._cost.device),
            "ideal_hits": round(100 * lru.row.ideal_hit_rate, 2),
        }

    def runs(self) -> dict[str, list[Run]]:
        """Run all policies in turns, and return the runs of each."""
        runs: dict[str, list[Run]] = {name: [] for name in POLICIES}
        names = list(POLICIES)
        for repeat in range(self._repeats):
            first = repeat % len(names)
            for name in names[first:] + names[:first]:
                one = self._run(name, self._seed + repeat)
                runs[name].append(one)
                measured = f"{one.hits():.2f}% hits, mean {fmean(one.ttfts()):,.0f} ms"
                print(f"{name}: {measured}; lab {one.hits_error():+.2f} points, {one.mean_ratio():.2f} x", flush=True)
        return runs

    def _run(self, name: str, seed: int) -> Run:
        arrivals = list(in_order(Open(rate=self._rate).over(self._trace, seed)))
        with self._server(name, self._memory) as url:
            results = asyncio.run(send(url, arrivals))
        engine = Engine(self._cost, MAX_RUNNING, TOKENS_PER_STEP)
        return Run(results, replay(self._trace, self._setup(name, self._memory), TimedArrivals(arrivals), engine))

    def _fitted(self, max_prompt: int, vocab: int) -> StepCost:
        """Return the cost of steps here, fitted to cold and warm prompts of several lengths, one by one."""
        rng, prompts, points = random.Random(self._seed), list[Request](), list[Point]()
        for n in [max_prompt >> shift for shift in range(6)] * FIT_REPEATS:
            cold = rng.choices(range(vocab), k=n)
            prompts += [request_of(cold), request_of(cold + rng.choices(range(vocab), k=WARM_TOKENS))]
        with self._server("lru", AMPLE_MEMORY) as url:
            for one in prompts:
                (result,) = asyncio.run(send(url, [(0.0, one)]))
                assert result.ttft is not None, "a request that was answered has a first token"
                token_seconds = sum(result.gaps) / (ANSWER - 1)
                points.append(Point(one.prompt_tokens, result.resumed_at or 0, result.ttft, ANSWER, token_seconds))
        fitted = fit(self._profile, load_device("cpu"), observe(points, TOKENS_PER_STEP))
        print(f"device fitted to {len(points)} requests, median error {fitted.median_error:.1%}", flush=True)
        return StepCost(self._profile, fitted.device)

    def _short_memory(self) -> tuple[int, Predicted]:
        """Return the least memory in which LRU has its share of the ideal hits, to a tenth, and its replay."""
        arrivals = list(in_order(Open(rate=1.0).over(self._trace, self._seed)))
        layout = self._setup("lru", AMPLE_MEMORY).layout(self._trace)
        pages = MAX_RUNNING * (layout.slot_pages + MAX_PROMPT // layout.page_size)  # of running requests
        memory = pages * AMPLE_MEMORY // layout.n_pages
        while True:
            lru = replay(self._trace, self._setup("lru", memory), TimedArrivals(arrivals))
            if lru.row.token_hit_rate >= HITS * lru.row.ideal_hit_rate:
                return memory, lru
            memory = memory * 11 // 10

    def _setup(self, name: str, memory: int) -> Setup:
        placement, eviction = POLICIES[name]
        return Setup(self._profile, memory, placement, eviction, decode_reuse="none")

    @contextmanager
    def _server(self, name: str, memory: int) -> Iterator[str]:
        """Serve the checkpoint under a policy, and yield the URL."""
        placement, eviction = POLICIES[name]
        options = {
            "placement": placement,
            "eviction": eviction,
            "memory": memory,
            "decode-reuse": "none",
            "max-running": MAX_RUNNING,
            "max-tokens-per-step": TOKENS_PER_STEP,
            "threads": self._threads,
        }
        flags = [f"--{option}={value}" for option, value in options.items()]
        with serve(str(self._folder), *flags) as serving:
            yield f"http://127.0.0.1:{serving.port}/v1"


def cut(request: Request, max_prompt: int, vocab: int) -> Request:
    """Return a request with its first tokens only, which the checkpoint's vocabulary has."""
    ids = np.frombuffer(request.text, np.int32, min(request.prompt_tokens, max_prompt)) % vocab
    return request_of(ids.tolist(), request.session)


def request_of(ids: Sequence[int], session: str = "") -> Request:
    """Return a request whose prompt is known and whose answer is not."""
    return Request(session, np.array(ids, np.int32).tobytes(), len(ids), ANSWER, len(ids))


async def send(url: str, arrivals: Sequence[tuple[float, Request]]) -> list[Result]:
    """Send requests at their times, whatever the state of earlier ones. Raises RuntimeError if one has no answer."""
    calls = []
    for number, (at, request) in enumerate(arrivals):
        prompt = tuple(np.frombuffer(request.text, np.int32, request.prompt_tokens).tolist())
        session = Session(f"{request.session} {number}", (Turn(prompt=prompt, output_tokens=request.output_tokens),))
        calls.append(Call(at, session, 0))
    endpoint = Endpoint(url, None, "default", FIELDS, ANSWER_SECONDS)
    try:
        results = await Load(endpoint, Limits()).open_loop(calls)
    finally:
        await endpoint.close()
    failed = [one for one in results if one.outcome != "ok"]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(results)} requests have no answer: {failed[0].detail}")
    return results


def rows_of(runs: Mapping[str, list[Run]]) -> list[Row]:
    """Return each policy's figures, and those of the default beside the others'."""
    rows = [
        Row(f"{name}: {figure}", unit, [value(one) for one in of], goal=GOALS.get(figure, ""))
        for name, of in runs.items()
        for figure, (unit, value) in FIGURES.items()
    ]
    means = {name: [fmean(one.ttfts()) for one in of] for name, of in runs.items()}
    ours = means.pop("headwater")
    best = [min(values) for values in zip(*means.values(), strict=True)]
    rows.append(Row("headwater's mean TTFT over LRU's", "ratio", measure.ratios(ours, means["lru"]), "<= 0.9"))
    rows.append(Row("headwater's mean TTFT over the best rival's", "ratio", measure.ratios(ours, best), "<= 1.02"))
    rows.append(Row("SegLen's mean TTFT over LRU's", "ratio", measure.ratios(means["seglen"], means["lru"])))
    return rows


def main() -> None:
    parser = measure.parser(__doc__, "served_policies", repeats=3)
    parser.add_argument("--data", type=Path, default=DATA, help="recorded traffic")
    parser.add_argument("--requests", type=int, default=300)
    given = measure.prepared(parser)
    with bench_checkpoint() as folder:
        bench = Bench(folder, given)
        rows = rows_of(bench.runs())
    measure.report(given, rows, **bench.settings)


if __name__ == "__main__":
    main()
