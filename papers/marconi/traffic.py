"""Marconi's figures about the traffic: reuse of blocks (3a), lengths of prompts and answers (6)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from headwater.lab.setup import Setup
from headwater.lab.tally import Outcome
from headwater.models.profiles import load_profile
from headwater.traces.arrivals import Poisson, sessions_of
from headwater.traces.request import Request, Trace
from papers.figure import Figure, Found, Line, Shape, quantile, ratio
from papers.lab import Lab
from papers.marconi.setting import AGENT, CHAT, CODE, DIALOGUES, GB, MODEL

LOAD = Poisson(2.0, 5.0)
MEMORY = 48  # GB
PAPER_3A = {32: (25.0, 0.4), 128: (None, 3.3)}  # by block: % of KV and of states used again


@dataclass
class Reuse:
    """Counts of computed blocks, and of those whose KV or state a later request uses."""

    block: int
    computed: int = 0
    kv_used: int = 0
    states_used: int = 0
    _id: dict[tuple[int, bytes], int] = field(default_factory=dict)  # of a block, by the one before and its tokens
    _kv: set[int] = field(default_factory=set)  # blocks computed and not used since
    _states: set[int] = field(default_factory=set)

    def add(self, request: Request, resumed_at: int) -> None:
        """Add a request that resumed at `resumed_at` and computed the rest of its prompt and answer."""
        known = resumed_at // self.block
        path = self._path(request)
        for block in path[:known]:
            if block in self._kv:
                self._kv.discard(block)
                self.kv_used += 1
        if known and path[known - 1] in self._states:
            self._states.discard(path[known - 1])
            self.states_used += 1
        new = path[known:]
        self.computed += len(new)
        self._kv.update(new)
        self._states.update(new)

    def percent(self) -> tuple[float, float]:
        """Return the percentages of computed blocks whose KV, and whose state, was reused."""
        return 100 * self.kv_used / self.computed, 100 * self.states_used / self.computed

    def _path(self, request: Request) -> list[int]:
        width, before, path = 4 * self.block, 0, []
        for at in range(0, request.known_tokens // self.block * width, width):
            before = self._id.setdefault((before, request.text[at : at + width]), len(self._id) + 1)
            path.append(before)
        return path


def fig3a(lab: Lab) -> Found:
    trace, profile = AGENT.read(lab), load_profile(MODEL)
    setups = [Setup(profile, MEMORY * GB, "every_block(1)", "lru_path", page_size=block) for block in PAPER_3A]
    lines, ratios, states = [], [], []
    for block, result in zip(PAPER_3A, lab.run(trace, setups, LOAD), strict=True):
        kv, state = _reuse(block, trace, result.outcomes, [one.resumed_at for one in result.outcomes])
        endless = _reuse(block, trace, result.outcomes, [one.ideal for one in result.outcomes])
        ratios.append(ratio(kv, state))
        states.append(state)
        lines += [
            Line(f"blocks of {block}: KV used again", PAPER_3A[block][0], kv, "%"),
            Line(f"blocks of {block}: states used again", PAPER_3A[block][1], state, "%"),
            Line(f"blocks of {block}: ratio", 65.3 if block == 32 else None, ratio(kv, state), "x"),
            Line(f"blocks of {block}, endless memory: KV used again", None, endless[0], "%"),
            Line(f"blocks of {block}, endless memory: states used again", None, endless[1], "%"),
        ]
    return Found(
        tuple(lines),
        (
            Shape("KV is used again ten times as often as states", min(ratios) > 10),
            Shape("larger blocks' states are used again more often", states == sorted(states)),
        ),
    )


def _reuse(block: int, trace: Trace, outcomes: Iterable[Outcome], resumed: Iterable[int]) -> tuple[float, float]:
    reuse = Reuse(block)
    for request, at in zip(_in_order(trace, outcomes), resumed, strict=True):
        reuse.add(request, at)
    return reuse.percent()


def _in_order(trace: Trace, outcomes: Iterable[Outcome]) -> Iterator[Request]:
    """Yield the requests in the order of their arrival."""
    sessions = {requests[0].session: iter(requests) for requests in sessions_of(trace.requests)}
    for outcome in outcomes:
        yield next(sessions[outcome.session])


FIG_3A = Figure(
    name="marconi-3a",
    title="KV blocks and states that are used again, with a checkpoint at every block",
    paper="Marconi, figure 3a and section 3",
    claim="a quarter of the blocks' KV is used again, but hardly any state.",
    difference=(
        "Less of both is used again than in the paper, and of states much less: an append-only agent resumes at "
        "one state a request, and its prompts have hundreds of blocks. With endless memory nearly all KV is used "
        "again, and states no more often for that."
    ),
    run=fig3a,
)


SHARES = (0.05, 0.5, 0.95)


def fig6(lab: Lab) -> Found:
    lines, prompts = [], {}
    for workload in (CHAT, CODE, DIALOGUES, AGENT):
        requests = workload.read(lab).requests
        prompts[workload.name] = [request.prompt_tokens for request in requests]
        answers = [request.output_tokens for request in requests]
        label = f"{workload.name} ({workload.dataset})"
        for what, lengths in (("prompt", prompts[workload.name]), ("answer", answers)):
            lines += [Line(f"{label}: {what}, P{100 * q:.0f}", None, quantile(lengths, q), "tokens") for q in SHARES]
    return Found(
        tuple(lines),
        (
            Shape("the agent's prompts reach tens of thousands of tokens", quantile(prompts["agent"], 0.95) > 10_000),
            Shape("and begin with hundreds", min(prompts["agent"]) < 1_000),
            Shape("most of the chat's are below 10K", quantile(prompts["chat"], 0.5) < 10_000),
            Shape("most of the dialogues' are below 2K", quantile(prompts["dialogues"], 0.75) < 2_000),
            Shape(
                "the agent's are spread widest, from P5 to P95",
                _spread(prompts["agent"]) == max(_spread(prompts[name]) for name in ("chat", "dialogues", "agent")),
            ),
        ),
    )


def _spread(lengths: list[int]) -> float:
    return quantile(lengths, 0.95) - quantile(lengths, 0.05)


FIG_6 = Figure(
    name="marconi-6",
    title="Lengths of prompts and answers",
    paper="Marconi, figure 6 and section 5.2",
    claim="SWE-bench spans hundreds to tens of thousands of tokens; LMSys is mostly below 10K, ShareGPT below 2K.",
    difference=(
        "Agent and dialogues have the paper's order of lengths, but our agent's first prompt already holds a long"
        " task description, and the dialogues are shorter than ShareGPT's. Claude Code's contexts are far longer "
        "than LMSys's: they stand for long chat beside Mooncake's, not for the paper's lengths."
    ),
    run=fig6,
)
