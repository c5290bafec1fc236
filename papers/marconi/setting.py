"""Marconi's setting: workloads that stand for its datasets, systems, and the cost of a prefill (section 5.1).

The paper has 100 sessions at 0.5 to 10 a second and 5 or 10 seconds between an answer and the next request. Memory is
chosen for our data, so that hit rates span the range of the paper's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from headwater.lab import cost as costs
from headwater.lab.cost import StepCost, load_device
from headwater.lab.row import Result
from headwater.lab.setup import SYSTEMS, Setup
from headwater.lab.tally import Outcome
from headwater.layers.mamba import Mamba
from headwater.models.profiles import Profile, load_profile
from headwater.traces.arrivals import Load, Poisson, Recorded
from headwater.traces.request import Trace
from papers.lab import InOrder, Lab

MODEL = "marconi-7b"
GB = 10**9
SWEEP = tuple(Poisson(rate, think) for rate, think in product((0.5, 5.0), (5.0, 10.0)))
BASELINES = ("vllm+", "sglang+", "marconi")


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace under a sweep of loads and memory sizes. `dataset`: its counterpart in the paper.

    published: the name of the artifact's own traces, with sessions a second and think time; used if below the data.
    """

    name: str
    dataset: str
    trace: str
    memories: tuple[float, ...]  # GB
    loads: tuple[Load, ...] = SWEEP
    sessions: int | None = None
    first: int | None = None
    page_size: int = 1
    published: str = ""

    @property
    def label(self) -> str:
        return f"{self.name} ({self.dataset})"

    def read(self, lab: Lab) -> Trace:
        if "(" in self.trace:
            return lab.drawn(self.trace, self.sessions)
        return lab.trace(self.trace, self.sessions, self.first)

    def under(self, lab: Lab, load: Load) -> tuple[Trace, Load]:
        """Return the artifact's trace of this load with its own times if it is there; else the workload's."""
        if self.published and isinstance(load, Poisson):
            trace = lab.published(self.published.format(load.rate, load.think))
            if trace is not None:
                return trace, InOrder()
        return self.read(lab), load


SWE_BENCH, SHARE_GPT = "swebench_sps={0:g}_art={1:g}_nums=100.jsonl", "sharegpt_sps={0:g}_nums=100.jsonl"
AGENT = Workload("agent", "SWE-bench", "mini_swe_agent", (6, 16, 48), sessions=40, published=SWE_BENCH)
DIALOGUES = Workload("dialogues", "ShareGPT", "mtbench101", (0.5, 1, 2), sessions=400, published=SHARE_GPT)
CHAT = Workload(
    "chat", "LMSys", "mooncake/conversation", (30, 100, 300, 1000), (Recorded(),), first=4000, page_size=512
)
CODE = Workload("long chat", "LMSys", "claude_code/local_v8", (10, 30, 100), sessions=30, page_size=64)
AGENTS = replace(AGENT, memories=(4, 8, 16, 32, 64), loads=(Poisson(5.0, 10.0),), sessions=100)  # as figure 11 has it
WORKLOADS = (CHAT, DIALOGUES, AGENT)


@dataclass(frozen=True, slots=True)
class Cell:
    """Results of several systems under one load, with `memory` GB."""

    memory: float
    results: dict[str, Result]

    def hit_rate(self, system: str) -> float:
        """Return the hit rate in percent of all prompt tokens."""
        return 100 * self.results[system].row.token_hit_rate


def setup_of(system: str, memory: float, page_size: int, profile: Profile | None = None) -> Setup:
    """Return a system's setup with `memory` GB. A trace's blocks override the system's own page size."""
    known = SYSTEMS[system]
    page = known.page_size if known.page_size is not None and page_size == 1 else page_size
    model, policies = profile or load_profile(MODEL), (known.placement, known.eviction)
    return Setup(model, int(memory * GB), *policies, page_size=page, tails=False)


def cells(lab: Lab, workload: Workload, systems: Sequence[str] = BASELINES) -> list[Cell]:
    """Return the cells of the whole sweep: for each load, those of each memory size."""
    found = []
    # the largest first: the slowest rows should not start last
    pairs = list(product(workload.memories, systems))[::-1]
    for load in workload.loads:
        setups = [setup_of(system, memory, workload.page_size) for memory, system in pairs]
        trace, arrivals = workload.under(lab, load)
        results = dict(zip(pairs, lab.run(trace, setups, arrivals), strict=True))
        found += [Cell(memory, {system: results[memory, system] for system in systems}) for memory in workload.memories]
    return found


STATE = 128  # the paper serves it with this state size; the published model has 16
BANDWIDTH = 1.555e12  # bytes a second, of the 40 GB board; NVIDIA A100 data sheet


def cost() -> StepCost:
    """Return the cost model of Jamba 1.5 Mini on four A100 GPUs."""
    profile = load_profile("jamba-1.5-mini")
    layers = tuple((replace(one, state=STATE) if isinstance(one, Mamba) else one, n) for one, n in profile.layers)
    jamba = replace(profile, name=f"jamba-1.5-mini, N = {STATE}", layers=layers, tensor_parallel=4)
    return StepCost(jamba, replace(load_device("a100"), bandwidth=BANDWIDTH))


def ttfts(model: StepCost, outcomes: Iterable[Outcome], cached: bool = True) -> list[float]:
    """Return the TTFT in milliseconds of each request, if a step contains only its prefill."""
    found = []
    for one in outcomes:
        prompt, resumed = one.prompt_tokens, one.resumed_at if cached else 0
        load = costs.Load(
            prefill_tokens=prompt - resumed,
            prefill_squares=prompt**2 - resumed**2,
            prefix_tokens=resumed,
            legs=1,
            states=1 + bool(resumed),
            logits=1,
        )
        found.append(1000 * model.seconds(load))
    return found
