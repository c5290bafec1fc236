"""Speculation: the drafts that each decoding request's next step verifies, and how many of them pay.

A draft costs a row of the step, and yields a token if it and all drafts before it are right. Costs are those that steps
were measured to have; chances are the request's own. The choice changes no bit of an answer, only its speed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from headwater.draft.drafter import MOST_DRAFTS, NO_DRAFT, Draft, Drafter, Source
from headwater.draft.forced import ForcedTokens, Grammar, allowed
from headwater.draft.ngram import PromptLookup
from headwater.draft.prediction import PredictedAnswer
from headwater.draft.suffix import PastAnswers, SuffixDrafter
from headwater.request import Generation

OFF = "off"
# drafts of a step: few sizes, so that recorded steps are met again
COUNTS = frozenset((1, 2, 3, 4, 6, 8, 12, 16, 24, 32))
FORGETS = 0.98  # weight of a server's earlier steps, and of their drafts, with each new one
ROW_COST = 0.1  # of a step, until it is measured
OUTLIER = 2  # times what is expected: kernels are read, or another process computes
LEAST_SPREAD = 0.01  # variance of the rows of recent steps from which their cost is learned
FORGETS_DRAFTS = 0.9  # of a request's earlier drafts, with each new step of it
EXPECTED = {  # chance that a draft is right, where < 4, 8, 16, 32 tokens agreed, or more
    Source.COPIED: (0.6, 0.55, 0.7, 0.95, 0.99),
    Source.PREDICTED: (0.6, 0.7, 0.9, 0.97, 0.99),
    Source.FORCED: (0.9, 0.9, 0.9, 0.9, 0.9),
}
WEIGHT = 4  # judged drafts that the server's experience counts as for a request, and what is expected for a server
# steps after which a request whose drafts do not pay tries one: at first, and at most; each try that fails doubles them
TRIES_EVERY, RARELY = 32, 256


class Sums:
    """Sums over steps of one kind: how many, their rows, rows squared, seconds, rows times seconds."""

    def __init__(self) -> None:
        self.n = self.x = self.xx = self.y = self.xy = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Add a step; earlier ones weigh less from now on."""
        terms = 1.0, rows, rows * rows, seconds, rows * seconds
        sums = self.n, self.x, self.xx, self.y, self.xy
        self.n, self.x, self.xx, self.y, self.xy = (FORGETS * s + t for s, t in zip(sums, terms, strict=True))

    @property
    def spread(self) -> tuple[float, float]:
        """Sums of squares of rows, and of rows times seconds, about their means."""
        return (self.xx - self.x * self.x / self.n, self.xy - self.x * self.y / self.n) if self.n else (0.0, 0.0)


class StepSeconds:
    """Seconds of a step by its rows: two lines of one slope, of steps without drafts and with them, as measured.

    The lines differ where steps without drafts are recorded, and steps with them are not.
    """

    def __init__(self) -> None:
        self._plain, self._drafting = Sums(), Sums()
        self._slope: float | None = None  # unknown until steps of different rows were measured

    def note(self, rows: int, drafts: int, seconds: float) -> None:
        """Add a step, some of whose rows are drafts; one with drafts counts at most OUTLIER times what is expected."""
        sums = self._drafting if drafts else self._plain
        if drafts and self._plain.n:
            seconds = min(seconds, OUTLIER * self(rows, drafts))
        sums.add(rows, seconds)
        (xx, xy), (its_xx, its_xy) = self._plain.spread, self._drafting.spread
        if xx + its_xx > LEAST_SPREAD * (self._plain.n + self._drafting.n):  # else it keeps the slope
            self._slope = max(0.0, (xy + its_xy) / (xx + its_xx))

    def __call__(self, rows: int, drafts: int) -> float:
        """Return the seconds of a step; before any step, their cost beside one row's."""
        sums = self._drafting if drafts and self._drafting.n else self._plain
        if not sums.n:
            return 1 + ROW_COST * rows
        slope = ROW_COST * sums.y / sums.n if self._slope is None else self._slope
        return max(1e-9, sums.y / sums.n + slope * (rows - sums.x / sums.n))

    def least_chance(self, rows: int) -> float:
        """Return the chance below which a draft lowers the tokens a second of a step, which has `rows` without any."""
        return rows * (self(rows + 2, 2) - self(rows + 1, 1)) / self(rows, 0)


@dataclass(eq=False)
class Share:
    """Drafts that were right, and drafts that were judged: those up to the first wrong one. Recent ones weigh more."""

    right: float = 0.0
    judged: float = 0.0

    def note(self, drafted: int, right: int, forgets: float) -> None:
        """Add the drafts of a request's step."""
        self.right = forgets * self.right + right
        self.judged = forgets * self.judged + right + (right < drafted)


class Experience:
    """Drafts of a server that were right, by their source and the context that agreed before them."""

    def __init__(self) -> None:
        self._shares = {
            source: [Share(WEIGHT * chance, WEIGHT) for chance in chances] for source, chances in EXPECTED.items()
        }

    def of(self, draft: Draft) -> Share:
        """Return the share of drafts of its source after about as many tokens that agreed."""
        shares = self._shares[draft.source]
        return shares[min(max(0, draft.agreed.bit_length() - 2), len(shares) - 1)]


@dataclass(eq=False)
class Speculator:
    """The drafters of one request, the surest first, and how often its drafts were right."""

    drafters: Sequence[Drafter]
    grammar: Grammar | None = None  # of a constrained answer
    most: int = MOST_DRAFTS  # drafts of a step
    experience: Experience = field(default_factory=Experience)
    own: dict[Source, Share] = field(default_factory=lambda: {source: Share() for source in Source})
    taken: int = 0  # tokens of the request that the drafter has
    idle: int = 0  # steps since a draft was judged
    tries_every: int = TRIES_EVERY  # idle steps
    draft: Draft = NO_DRAFT  # the last one

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most so many tokens that may be next."""
        new, self.taken = tokens[self.taken :], len(tokens)
        for drafter in self.drafters:
            drafter.take(new)
        self.idle += 1
        drafts = (drafter.propose(min(most, self.most)) for drafter in self.drafters)
        self.draft = next((draft for draft in drafts if draft.tokens), NO_DRAFT)
        if self.grammar is not None and self.draft.source is not Source.FORCED and self.draft.tokens:
            self.draft = allowed(self.grammar, self.draft)
        return self.draft.tokens

    def learn(self, drafted: int, right: int) -> None:
        """Note how many drafts of a step were right."""
        if right:
            self.tries_every = TRIES_EVERY
        elif self.idle > self.tries_every:
            self.tries_every = min(2 * self.tries_every, RARELY)
        self.idle = 0
        self.own[self.draft.source].note(drafted, right, FORGETS_DRAFTS)
        self.experience.of(self.draft).note(drafted, right, FORGETS)

    @property
    def chance(self) -> float:
        """The chance that a draft is right if those before it are: the server's experience, then the request's own."""
        server, own = self.experience.of(self.draft), self.own[self.draft.source]
        return (own.right + WEIGHT * server.right / server.judged) / (own.judged + WEIGHT)


@dataclass(eq=False)
class Speculation:
    """Drafts for requests of a server. Without a drafter there are none."""

    drafter: Callable[[str], Drafter] | None = None  # of a namespace's request that names none
    past: PastAnswers = field(default_factory=PastAnswers)
    learns: bool = False  # answers are kept for drafts of later ones
    kind: str = OFF  # the setting
    accepted: int = 0  # drafts, since the start
    rejected: int = 0
    seconds: StepSeconds = field(default_factory=StepSeconds)
    experience: Experience = field(default_factory=Experience)

    def __bool__(self) -> bool:
        return self.drafter is not None

    def speculator(self, generation: Generation, grammar: Grammar | None = None) -> Speculator | None:
        """Return what a request drafts with, if it does. `grammar`: the constraint of its answer."""
        asked = generation.drafting
        if self.drafter is None or asked.drafter == OFF:
            return None
        drafters: list[Drafter] = [] if grammar is None else [ForcedTokens(grammar)]
        if asked.prediction:
            drafters.append(PredictedAnswer(asked.prediction, len(generation.prompt)))
        build = self.drafter if asked.drafter is None else partial(DRAFTERS[asked.drafter], self.past)
        drafters.append(build(generation.namespace))
        most = MOST_DRAFTS if asked.tokens is None else asked.tokens
        return Speculator(drafters, grammar, most, self.experience)

    def learn(self, speculator: Speculator | None, drafted: int, right: int) -> None:
        """Note how many drafts of a request's step were right."""
        self.accepted += right
        self.rejected += drafted - right
        if speculator is not None:
            speculator.learn(drafted, right)

    def remember(self, namespace: str, answer: Sequence[int]) -> None:
        """Take an answer that is complete as text for drafts of its namespace."""
        if self.learns:
            self.past.add(namespace, answer)

    def worth(self, drafts: Sequence[tuple[Speculator, int]], rows: int) -> list[int]:
        """Return how many drafts each of these requests verifies in a step that has `rows` rows without any.

        `drafts` are how many each has at most. Of the drafts that are likeliest right, as many are taken as make the
        expected tokens of a second most.
        """
        least, chances = self.seconds.least_chance(rows), list[tuple[float, int]]()
        for number, (one, most) in enumerate(drafts):
            right = chance = one.chance
            while most and right > least:
                chances.append((right, number))
                right, most = right * chance, most - 1
        chances.sort(reverse=True)
        tokens = float(rows)
        best, most_a_second = 0, tokens / self.seconds(rows, 0)
        for n, (chance, _) in enumerate(chances, start=1):
            tokens += chance
            if n in COUNTS and tokens > most_a_second * self.seconds(rows + n, n):
                best, most_a_second = n, tokens / self.seconds(rows + n, n)
        counts = Counter(number for _, number in chances[:best])
        tries = (most > 0 and one.idle > one.tries_every for one, most in drafts)
        return [counts[number] or int(trying) for number, trying in enumerate(tries)]


DRAFTERS: dict[str, Callable[[PastAnswers, str], Drafter]] = {
    "ngram": lambda past, namespace: PromptLookup(),
    "suffix": SuffixDrafter,
}


def speculation_of(kind: str) -> Speculation:
    """Return the speculation of a setting: off, or one of DRAFTERS."""
    if kind == OFF:
        return Speculation()
    past = PastAnswers()
    return Speculation(partial(DRAFTERS[kind], past), past, learns=kind == "suffix", kind=kind)
