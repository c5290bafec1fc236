"""SegLen's tables ("Rethinking Prefix Caching for Hybrid LLMs"): Qwen3.5-9B on one H100, two pools, three policies."""

from __future__ import annotations

from dataclasses import replace

from headwater.lab.cost import StepCost, load_device
from headwater.lab.row import Row
from headwater.lab.serving import Engine
from headwater.lab.setup import Setup
from headwater.models.profiles import load_profile
from headwater.traces.arrivals import Poisson
from headwater.traces.request import Trace
from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab

GIB = 2**30
POOLS = 43 * GIB  # 20.39 GiB of states and 22.61 GiB of KV, which is what a fraction of 0.77 leaves beside the weights
FULL = 0.77
STATE_FRACTION = 0.474  # of the pools: states to KV as 0.9 to 1
POLICIES = {"lru": "lru_path", "seglen": "seglen", "marconi": "flop_aware(1.0)"}
Paper = dict[str, tuple[float, float, float]]  # by policy: mean TTFT in ms, mean queue depth, mean hit rate


def rows(lab: Lab, trace: Trace, load: Poisson, fraction: float = FULL) -> dict[str, Row]:
    """Return a row for each policy. SGLang keeps the state after the last decoded token, as `raw` does."""
    profile = load_profile("qwen3.5-9b")
    weights = profile.weight_bytes
    memory = round(fraction / FULL * (POOLS + weights) - weights)
    base = Setup(profile, memory, placement="branch", pool="split", state_fraction=STATE_FRACTION, decode_reuse="raw")
    setups = [replace(base, eviction=eviction) for eviction in POLICIES.values()]
    engine = Engine(StepCost(profile, load_device("h100")))
    results = lab.run(trace, setups, load, engine)
    return {name: result.row for name, result in zip(POLICIES, results, strict=True)}


def lines(found: dict[str, Row], paper: Paper, label: str = "") -> list[Line]:
    """Return three lines for each policy."""
    made = []
    for name, row in found.items():
        ttft = None if row.ttft_ms is None else row.ttft_ms.mean
        ours = (ttft, row.queue_depth, row.token_hit_rate)
        for what, theirs, own, unit in zip(
            ("mean TTFT", "queue depth", "hit rate"), paper[name], ours, ("ms", "requests", ""), strict=True
        ):
            made.append(Line(f"{label}{name}: {what}", theirs, own, unit))
    return made


def ttft(row: Row) -> float:
    assert row.ttft_ms is not None, "it ran under a clock"
    return row.ttft_ms.mean


def table(lab: Lab, trace: Trace, load: Poisson, paper: Paper) -> Found:
    """Return one of the article's tables by policy, and its shapes."""
    found = rows(lab, trace, load)
    shapes = [
        Shape("SegLen's mean TTFT is below LRU's", ttft(found["seglen"]) < ttft(found["lru"])),
        Shape("SegLen's hit rate is above LRU's", found["seglen"].token_hit_rate > found["lru"].token_hit_rate),
        Shape("SegLen's mean TTFT is at most Marconi's", ttft(found["seglen"]) <= ttft(found["marconi"])),
    ]
    return Found(tuple(lines(found, paper)), tuple(shapes))


SESSIONS = 100
DIFFERENCE = (
    "mini_swe_agent's sessions replace SWE-bench's: 40 requests each on average, while the article's prefixes are used "
    "5 or 10 times. So more tokens arrive per second than the device computes, requests wait for it, and times are "
    "several times the article's; hit rates under LRU are similar. All prefixes of a session have about the same "
    "length, and the session returns every few seconds: recency predicts reuse almost completely, and weighing by "
    "length adds little. `lru_path` replaces SGLang's own policy, a static alpha of 1 Marconi in SGLang; times come "
    "from the roofline."
)


def _swebench(name: str, think: float, paper: Paper) -> Figure:
    def run(lab: Lab) -> Found:
        return table(lab, lab.trace("mini_swe_agent", sessions=SESSIONS), Poisson(10.0, think), paper)

    return Figure(
        name=name,
        title=f"Agents' sessions, {think:g} s between turns",
        paper=f"SegLen, swebench_sps=10_art={think:g}_nums=100",
        claim="SegLen halves LRU's mean time to the first token and hits more; Marconi lies between.",
        difference=DIFFERENCE,
        run=run,
    )


SWE_5 = _swebench(
    "seglen-swe5",
    5.0,
    {
        "lru": (2107.68, 10.3686, 0.3261),
        "seglen": (1027.35, 4.8386, 0.4179),
        "marconi": (1178.64, 5.6679, 0.4065),
    },
)
SWE_10 = _swebench(
    "seglen-swe10",
    10.0,
    {
        "lru": (2273.05, 11.2514, 0.2994),
        "seglen": (1101.67, 5.9165, 0.4353),
        "marconi": (1335.84, 7.2620, 0.4242),
    },
)


PAPER_CHAT = {"lru": (72.48, 0.0004, 0.0022), "seglen": (72.39, 0.0, 0.0049), "marconi": (75.29, 0.0004, 0.0049)}


def chat(lab: Lab) -> Found:
    return table(lab, lab.trace("mtbench101"), Poisson(10.0, 5.0), PAPER_CHAT)


CHAT = Figure(
    name="seglen-chat",
    title="Chats with little reuse",
    paper="SegLen, ShareGPT",
    claim="Where little is reused, the three policies are alike.",
    difference=(
        "mtbench101's dialogues stand for ShareGPT's first turns: they are short, and later turns hit their own "
        "history, which the article's run did not send. So something is reused after all, the pool of states does not "
        "hold all dialogues, and weighing by length keeps the long ones rather than those that go on."
    ),
    run=chat,
)


PAPER_MEMORY: dict[float, Paper] = {
    0.77: {
        "lru": (1697.04, 8.4729, 0.3317),
        "seglen": (934.93, 4.6355, 0.4226),
        "marconi": (1110.74, 5.4124, 0.4088),
    },
    0.7: {
        "lru": (2809.16, 14.3618, 0.2912),
        "seglen": (1704.70, 9.0218, 0.3775),
        "marconi": (1992.97, 10.1597, 0.3835),
    },
    0.5: {
        "lru": (13283.69, 58.0286, 0.1290),
        "seglen": (9706.63, 44.9238, 0.2249),
        "marconi": (10194.86, 46.8752, 0.2238),
    },
}


def memory(lab: Lab) -> Found:
    trace = lab.trace("mini_swe_agent", sessions=SESSIONS)
    made: list[Line] = []
    saved, rates = [], []
    for fraction, paper in PAPER_MEMORY.items():
        found = rows(lab, trace, Poisson(10.0, 5.0), fraction)
        made += lines(found, paper, f"{fraction:g}, ")
        saved.append(ttft(found["lru"]) - ttft(found["seglen"]))
        rates.append([row.token_hit_rate for row in found.values()])
    falls = all(less < more for more, less in zip(rates[0], rates[-1], strict=True))
    return Found(
        tuple(made),
        (
            Shape("less memory, fewer hits, under every policy", falls),
            Shape("SegLen's mean TTFT is below LRU's at each size", all(one > 0 for one in saved)),
            Shape("it saves the more milliseconds the less memory there is", saved == sorted(saved)),
        ),
    )


MEMORY = Figure(
    name="seglen-memory",
    title="Memory for weights and pools",
    paper="SegLen, memory fractions",
    claim="The tighter the memory, the more SegLen gains over LRU.",
    difference=DIFFERENCE,
    run=memory,
)
