"""Speculation: the drafts that the next step verifies for each decoding request.

A draft costs a row of the step, and yields a token if it and all drafts before it are right. Costs are measured in
earlier steps; chances are the request's own. The choice changes no bit of an answer, only its speed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from headwater.draft.drafter import MOST_DRAFTS, MTP_DRAFTS, NO_DRAFT, Draft, Drafter, Source
from headwater.draft.forced import ForcedTokens, Grammar, allowed
from headwater.draft.ngram import PromptLookup
from headwater.draft.prediction import PredictedAnswer
from headwater.draft.suffix import PastAnswers, SuffixDrafter
from headwater.request import Generation
from headwater.schedule.draft_gains import OUTLIER_FACTOR, AskingTime, StepSeconds, Trials, Trust
from headwater.schedule.sequence import Sequence as AnySequence

OFF, AUTO, MTP, DRAFT = "off", "auto", "mtp", "draft"
# drafts of a step: few different numbers, so that recorded steps are met again
COUNTS = frozenset((1, 2, 3, 4, 6, 8, 12, 16, 24, 32))
SERVER_DECAY = 0.98  # weight of a server's earlier drafts with each new step of them
REQUEST_DECAY = 0.9  # of a request's earlier drafts, with each new step of it
EXPECTED = {  # chance that a draft is right if < 4, 8, 16, 32 tokens agreed, or more
    Source.COPIED: (0.6, 0.55, 0.7, 0.95, 0.99),
    Source.PREDICTED: (0.6, 0.7, 0.9, 0.97, 0.99),
    Source.FORCED: (0.9, 0.9, 0.9, 0.9, 0.9),
    Source.HEAD: (0.3, 0.6, 0.75, 0.85, 0.95),  # if its probability is < 0.5, 0.75, 0.875, 0.94, or more
}
HEAD_TRIALS = 2  # drafts of the head for a request, before its own drafts count
PRIOR_DRAFTS = 4  # that the server's experience counts as for a request, and EXPECTED for a server
# steps after which a request whose drafts do not pay tries one: at first, and at most; each failed try doubles them
TRY_PERIOD, MAX_TRY_PERIOD = 32, 256
LIKELY_CHANCE = 0.5  # of drafts that are tried whatever they cost
HEAD_TRY_PERIOD = 8  # requests of which one tries a head that does not pay
CLEAR_GAIN = 1.5  # from which steps without drafts are measured rarely
MAX_PAUSE_STEPS = 8  # in which a request is not asked for drafts, after some in which none paid
CHEAP_PASS = 0.1  # of a step: a pass of the head that is tried for each new request

log = logging.getLogger("headwater.schedule")


@dataclass(eq=False)
class Share:
    """Number of right drafts, and of judged ones: those up to the first wrong one. Recent ones weigh more."""

    right: float = 0.0
    judged: float = 0.0

    def note(self, drafted: int, right: int, forgets: float) -> None:
        """Add the drafts of a request's step."""
        self.right = forgets * self.right + right
        self.judged = forgets * self.judged + right + (right < drafted)


class Experience:
    """Shares of right drafts of a server, by their source and the context that agreed before them."""

    def __init__(self) -> None:
        self.tries_every = TRY_PERIOD  # steps of a new request: a failed try doubles them, a right draft resets them
        self._shares = {
            source: [Share(PRIOR_DRAFTS * chance, PRIOR_DRAFTS) for chance in chances]
            for source, chances in EXPECTED.items()
        }

    def of(self, draft: Draft) -> Share:
        """Return the share for drafts of the same source, after about as many tokens that agreed."""
        shares = self._shares[draft.source]
        return shares[min(max(0, draft.agreed.bit_length() - 2), len(shares) - 1)]

    def of_source(self, source: Source) -> float:
        """Return the share of right drafts of a source, whatever agreed before them."""
        shares = self._shares[source]
        return sum(share.right for share in shares) / sum(share.judged for share in shares)


class Guesser(Protocol):
    """The model's head of multi-token prediction, or a smaller model, which drafts for several requests at once."""

    @property
    def pass_seconds(self) -> float:
        """Seconds of one draft for some sequences."""

    def guess(self, wanted: Sequence[tuple[AnySequence, int]], least: float) -> list[Draft]:
        """Return a draft for each sequence, at most of the given tokens, each right with a chance of at least `least`.

        The sequences have pages for as many tokens after their last one.
        """

    def forget(self, request: int) -> None:
        """Note that a request has ended."""


def sum_of_chances(chance: float, n: int) -> float:
    """Return the expected number of right drafts of n, each of which is right with `chance` if those before it are."""
    return n if chance >= 1 else chance * (1 - chance**n) / (1 - chance)


@dataclass(eq=False)
class Speculator:
    """Drafters of one request, the most reliable first, and the share of its drafts that were right."""

    drafters: Sequence[Drafter]
    grammar: Grammar | None = None  # of a constrained answer
    most: int = MOST_DRAFTS  # drafts of a step
    experience: Experience = field(default_factory=Experience)
    own: dict[Source, Share] = field(default_factory=lambda: {source: Share() for source in Source})
    taken: int = 0  # tokens of the request that the drafters have
    idle: int = 0  # steps since a draft was judged
    pauses: int = 0  # steps left in which it is not asked
    next_pause: int = 1
    tries_every: int = 0  # idle steps; 0: as a new request of the server
    draft: Draft = NO_DRAFT  # the last one
    uses_head: bool = False
    from_head: int = 0  # drafts of the head
    asking: float = 0.0  # seconds that the last draft took

    def __post_init__(self) -> None:
        self.tries_every = self.tries_every or self.experience.tries_every

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens that may be next: the draft with most tokens expected to be right."""
        new, self.taken = tokens[self.taken :], len(tokens)
        for drafter in self.drafters:
            drafter.take(new)
        self.idle += 1
        found = (self._allowed(drafter.propose(min(most, self.most))) for drafter in self.drafters)
        self.draft = max((draft for draft in found if draft.tokens), key=self._expected, default=NO_DRAFT)
        return self.draft.tokens

    def is_paused(self, time_is_left: bool) -> bool:
        """Count a step; return whether it asks for no drafts, since none paid before, or no time is left.

        A constraint's forced tokens are always asked for.
        """
        paused = self.pauses > 0
        self.pauses -= paused
        skips = paused or not (time_is_left or self.grammar is not None)
        self.idle += skips
        return skips

    def note_verified(self, drafts: int) -> None:
        """Note how many drafts of the request a step verifies: after none, the request pauses ever longer.

        A constraint's forced tokens may come at any step, so a request with one does not pause.
        """
        if drafts or self.grammar is not None:
            self.next_pause = 1
        else:
            self.pauses, self.next_pause = self.next_pause, min(2 * self.next_pause, MAX_PAUSE_STEPS)

    def wants_head(self, least: float, cheap: bool) -> bool:
        """Return whether the head may draft better, and its drafts were right as often as `least`, or may be tried.

        A `cheap` head drafts first for every request: earlier requests may have been of another kind.
        """
        chance = self.chance_of_head
        may_pay = chance >= least or self.idle >= self.tries_every or (cheap and self.from_head < HEAD_TRIALS)
        return self.uses_head and may_pay and sum_of_chances(chance, MTP_DRAFTS) > self._expected(self.draft)

    @property
    def chance_of_head(self) -> float:
        """The chance that a token of the head's draft is right if those before it are."""
        own = self.own[Source.HEAD]
        return (own.right + PRIOR_DRAFTS * self.experience.of_source(Source.HEAD)) / (own.judged + PRIOR_DRAFTS)

    def consider(self, draft: Draft) -> None:
        """Use the head's draft if more of its tokens are expected to be right."""
        draft = self._allowed(draft)
        self.from_head += 1
        if draft.tokens and self._expected(draft) > self._expected(self.draft):
            self.draft = draft

    def _expected(self, draft: Draft) -> float:
        """Return how many of a draft's tokens are expected to be right."""
        return sum_of_chances(self._chance_of(draft), len(draft.tokens))

    def _allowed(self, draft: Draft) -> Draft:
        """Cut a draft where the request's constraint forbids it."""
        free = self.grammar is None or draft.source is Source.FORCED or not draft.tokens
        return draft if free or self.grammar is None else allowed(self.grammar, draft)

    def learn(self, drafted: int, right: int) -> None:
        """Note how many drafts of a step were right."""
        server = self.experience
        if right:
            self.tries_every = server.tries_every = TRY_PERIOD
        elif self.idle > self.tries_every:
            self.tries_every = min(2 * self.tries_every, MAX_TRY_PERIOD)
            server.tries_every = min(2 * server.tries_every, MAX_TRY_PERIOD)
        self.idle = 0
        self.own[self.draft.source].note(drafted, right, REQUEST_DECAY)
        self.experience.of(self.draft).note(drafted, right, SERVER_DECAY)

    @property
    def chance(self) -> float:
        """The chance that a token of the draft is right if those before it are."""
        return self._chance_of(self.draft)

    def _chance_of(self, draft: Draft) -> float:
        """Return the chance of a draft's token: the server's experience, then the request's own."""
        server, own = self.experience.of(draft), self.own[draft.source]
        return (own.right + PRIOR_DRAFTS * server.right / server.judged) / (own.judged + PRIOR_DRAFTS)


@dataclass(eq=False)
class Speculation:
    """Drafts for the requests of a server. Without drafters there are none."""

    drafters: Callable[[str], list[Drafter]] | None = None  # of a namespace's request that names none
    past: PastAnswers = field(default_factory=PastAnswers)
    learns: bool = False  # answers are stored for drafts of later ones
    kind: str = OFF  # the setting
    why_off: str | None = None  # although the setting is another
    accepted: int = 0  # drafts, since the start
    rejected: int = 0
    seconds: StepSeconds = field(default_factory=StepSeconds)
    clock: Callable[[], float] = lambda: 0.0  # seconds; by default asking takes no time
    asking: AskingTime = field(default_factory=AskingTime)
    trust: Trust = field(default_factory=Trust)
    trials: Trials = field(default_factory=Trials)
    tries: bool = False  # the planned step verifies likely drafts, whatever their expected cost
    is_plain: bool = True  # the planned step asked for no drafts, and replays none
    _unasked: int = 0  # steps since the head was asked
    _asks_every: int = TRY_PERIOD  # of such steps
    _new: int = 0  # requests that may draft with the head
    _expected_gain: float = 0.0  # of the drafts of the planned step; 0: none are expected to pay
    experience: Experience = field(default_factory=Experience)
    head: Guesser | None = None

    def __bool__(self) -> bool:
        return self.drafters is not None

    @property
    def shown(self) -> str:
        """The setting, or why there are no drafts although it asks for them."""
        return self.kind if self.why_off is None else f"{OFF}, {self.why_off}"

    def speculator(self, generation: Generation, grammar: Grammar | None = None) -> Speculator | None:
        """Return the drafters of a request; None if it has no drafts. `grammar`: the constraint of its answer."""
        asked = generation.drafting
        if self.drafters is None or asked.drafter == OFF:
            return None
        drafters: list[Drafter] = [] if grammar is None else [ForcedTokens(grammar)]
        if asked.prediction:
            drafters.append(PredictedAnswer(asked.prediction, len(generation.prompt)))
        build = self.drafters if asked.drafter is None else partial(DRAFTERS[asked.drafter], self.past)
        drafters += build(generation.namespace)
        most = MOST_DRAFTS if asked.tokens is None else asked.tokens
        uses_head = self.head is not None and (asked.drafter or self.kind) in (AUTO, MTP, DRAFT)
        uses_head = uses_head and (asked.drafter in (MTP, DRAFT) or self._head_pays())
        return Speculator(drafters, grammar, most, self.experience, uses_head=uses_head)

    def _head_pays(self) -> bool:
        """Return whether a new request may draft with the head: few may if it did not pay at its last try."""
        self._new += 1
        return self._asks_every == TRY_PERIOD or self._new % HEAD_TRY_PERIOD == 0

    def ask_head(self, wanted: Sequence[tuple[AnySequence, Speculator, int]], rows: int) -> None:
        """Let the head draft for requests, at most the given tokens of each, before a step that has `rows` rows."""
        assert self.head is not None
        a_pass = self.head.pass_seconds / self.seconds(rows, 0)
        least = self.seconds.min_chance(rows) + a_pass * rows / max(1, len(wanted))
        cheap = self.head.pass_seconds < CHEAP_PASS * self.seconds(rows, 0)
        asking = [(seq, one, most) for seq, one, most in wanted if most > 0 and one.wants_head(least, cheap)]
        if not self._is_asked([(one, most) for _, one, most in asking], rows):
            return
        try:
            drafts = self.head.guess([(seq, most) for seq, _, most in asking], least)
        except Exception:  # no request needs drafts
            log.exception("drafting failed, and is off from now on")
            self.head = None
            return
        for (_, one, _), draft in zip(asking, drafts, strict=True):
            one.consider(draft)

    def _is_asked(self, asking: Sequence[tuple[Speculator, int]], rows: int) -> bool:
        """Return whether the head drafts before a step: if that is expected to pay, else ever more rarely."""
        if not asking:
            return False
        self._unasked += 1
        if self._may_gain(asking, rows):
            self._asks_every = TRY_PERIOD
        elif self._unasked <= self._asks_every:
            return False
        else:
            self._asks_every = min(2 * self._asks_every, MAX_TRY_PERIOD)
        self._unasked = 0
        return True

    def _may_gain(self, asking: Sequence[tuple[Speculator, int]], rows: int) -> bool:
        """Return whether a step that has `rows` rows gives more tokens a second with the head's drafts of requests."""
        drafts = sum(most for _, most in asking)
        expected = sum(sum_of_chances(one.chance_of_head, most) for one, most in asking)
        if self.tries:
            return True
        gain = (rows + expected) * self.seconds(rows, 0) / (rows * self.seconds(rows + drafts, drafts))
        return gain * self.trust.of(rows) > 1

    def propose(self, speculator: Speculator, tokens: Sequence[int], most: int) -> None:
        """Ask a request for a draft of at most `most` tokens. The time of one with a constraint is not limited."""
        begun = self.clock()
        speculator.propose(tokens, most)
        speculator.asking = self.clock() - begun if speculator.grammar is None else 0.0
        self.asking.spend(speculator.asking)

    def is_to_measure(self, rows: int) -> bool:
        """Count a step that is planned; return whether it is to have no drafts, so that its seconds are known."""
        self.tries = self.trials.is_due(rows)
        return self.seconds.is_to_measure(rows, self._expected_gain * self.trust.of(rows) < CLEAR_GAIN)

    def note_step(self, rows: int, drafts: int, right: int, seconds: float) -> None:
        """Add the seconds of a step without legs; without drafts only if it asked for none and replayed none."""
        plain = rows - drafts
        if drafts:
            self.trials.note(plain)
        if drafts and self._expected_gain and self.seconds.knows_plain:
            counted = min(seconds, OUTLIER_FACTOR * self.seconds(rows, drafts))
            gained = (plain + right) * self.seconds(plain, 0) / (plain * counted)
            self.trust.note(plain, self._expected_gain, gained)
        elif rows:
            self.trust.relax(rows)
        if drafts or self.is_plain:
            self.seconds.note(rows, drafts, seconds)

    def learn(self, speculator: Speculator | None, drafted: int, right: int) -> None:
        """Note how many drafts of a request's step were right."""
        self.accepted += right
        self.rejected += drafted - right
        if speculator is not None:
            speculator.learn(drafted, right)

    def forget(self, request: int) -> None:
        """Note that a request has ended."""
        if self.head is not None:
            self.head.forget(request)

    def remember(self, namespace: str, answer: Sequence[int]) -> None:
        """Add a complete answer to the text for drafts of its namespace."""
        if self.learns:
            self.past.add(namespace, answer)

    def worth(self, drafts: Sequence[tuple[Speculator, int]], rows: int, room: int) -> list[int]:
        """Return how many drafts each of these requests verifies in a step that has `rows` rows without any.

        `drafts`: at most how many each has; `room`: how many the step has. The drafts with the best chances are chosen,
        as many as give most tokens a second; none if such drafts gained less than expected.
        """
        self._expected_gain = 0.0
        if not any(most for _, most in drafts):
            return [0] * len(drafts)
        least = LIKELY_CHANCE if self.tries else self.seconds.min_chance(rows)
        chances = list[tuple[float, int]]()
        for number, (one, most) in enumerate(drafts):
            right = chance = one.chance
            while most and right > least:
                chances.append((right, number))
                right, most = right * chance, most - 1
        chances.sort(reverse=True)
        tokens = float(rows)
        best, plain_a_second = 0, tokens / self.seconds(rows, 0)
        most_a_second = plain_a_second
        for n, (chance, _) in enumerate(chances[:room], start=1):
            tokens += chance
            if n in COUNTS and tokens > most_a_second * self.seconds(rows + n, n):
                best, most_a_second = n, tokens / self.seconds(rows + n, n)
        if best and most_a_second * self.trust.of(rows) <= plain_a_second:
            best = 0
        self._expected_gain = most_a_second / plain_a_second if best else 0.0
        if self.tries and not best:
            best = min(len(chances), room)
        counts = Counter(number for _, number in chances[:best])
        tries = (most > 0 and one.idle > one.tries_every for one, most in drafts)
        return [counts[number] or int(trying) for number, trying in enumerate(tries)]


DRAFTERS: dict[str, Callable[[PastAnswers, str], list[Drafter]]] = {
    AUTO: lambda past, namespace: [SuffixDrafter(past, namespace)],
    "ngram": lambda past, namespace: [PromptLookup()],
    "suffix": lambda past, namespace: [SuffixDrafter(past, namespace)],
    MTP: lambda past, namespace: [],
    DRAFT: lambda past, namespace: [],
}


def speculation_of(kind: str) -> Speculation:
    """Return the speculation of a setting: off, or one of DRAFTERS. The caller adds the head."""
    if kind == OFF:
        return Speculation()
    past = PastAnswers()
    return Speculation(partial(DRAFTERS[kind], past), past, learns=kind in (AUTO, "suffix"), kind=kind)
