"""With a checkpoint at every block: how many blocks' KV, and how many states, are ever used again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from headwater.lab.setup import Setup
from headwater.lab.tally import Outcome
from headwater.models.profiles import load_profile
from headwater.traces.arrivals import Poisson, sessions_of
from headwater.traces.request import Request, Trace
from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab
from papers.marconi.workloads import AGENT, GB, MODEL
from papers.quantile import ratio

LOAD = Poisson(2.0, 5.0)
MEMORY = 48  # GB
PAPER = {32: (25.0, 0.4), 128: (None, 3.3)}  # by block: % of KV and of states used again


@dataclass
class Reuse:
    """Blocks as they are computed, and what of them later requests use."""

    block: int
    computed: int = 0
    kv_used: int = 0
    states_used: int = 0
    _id: dict[tuple[int, bytes], int] = field(default_factory=dict)  # of a block, by the one before and its tokens
    _kv: set[int] = field(default_factory=set)  # blocks computed and not used since
    _states: set[int] = field(default_factory=set)

    def add(self, request: Request, resumed_at: int) -> None:
        """A request that resumed there and computed the rest of its prompt and answer."""
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
        """Of all blocks that were computed: those whose KV, and those whose state, was used again."""
        return 100 * self.kv_used / self.computed, 100 * self.states_used / self.computed

    def _path(self, request: Request) -> list[int]:
        width, before, path = 4 * self.block, 0, []
        for at in range(0, request.known_tokens // self.block * width, width):
            before = self._id.setdefault((before, request.text[at : at + width]), len(self._id) + 1)
            path.append(before)
        return path


def run(lab: Lab) -> Found:
    trace, profile = AGENT.read(lab), load_profile(MODEL)
    setups = [Setup(profile, MEMORY * GB, "every_block(1)", "lru_path", page_size=block) for block in PAPER]
    lines, ratios, states = [], [], []
    for block, result in zip(PAPER, lab.run(trace, setups, LOAD), strict=True):
        kv, state = _reuse(block, trace, result.outcomes, [one.resumed_at for one in result.outcomes])
        endless = _reuse(block, trace, result.outcomes, [one.ideal for one in result.outcomes])
        ratios.append(ratio(kv, state))
        states.append(state)
        lines += [
            Line(f"blocks of {block}: KV used again", PAPER[block][0], kv, "%"),
            Line(f"blocks of {block}: states used again", PAPER[block][1], state, "%"),
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
    """The requests in the order in which they came."""
    sessions = {requests[0].session: iter(requests) for requests in sessions_of(trace.requests)}
    for outcome in outcomes:
        yield next(sessions[outcome.session])


FIGURE = Figure(
    name="marconi-3a",
    title="KV blocks and states that are used again, with a checkpoint at every block",
    paper="Marconi, figure 3a and section 3",
    claim="a quarter of the blocks' KV is used again, but hardly any state.",
    difference=(
        "Less of both is used again than in the paper, and of states much less: an append-only agent resumes at "
        "one state a request, and its prompts have hundreds of blocks. With endless memory nearly all KV is used "
        "again, and states no more often for that."
    ),
    run=run,
)
