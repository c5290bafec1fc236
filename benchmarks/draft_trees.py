"""Trees of drafts beside chains: how often another choice of the MTP head is right if its first one is not.

    python -m benchmarks.draft_trees [--items 60] [--small]

Answers are the embedded model's own, to held-out questions about documents, and tool calls: greedy, one at once. Before
each step the head says how likely each token is at 1 to 4 tokens ahead, given the answer's true tokens before that; a
rank of 0 is its first choice. A chain takes rank 0 alone. A tree has the 8 drafts, at most 4 deep and of rank 0 to 3,
that were right most often in these very answers: no fixed tree of 8 drafts accepts more. Tokens a step have the step's
own among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from unittest.mock import patch

import torch

from benchmarks import measure
from benchmarks.engines import Asked, Model, finished, settle
from benchmarks.measure import Row
from benchmarks.mtp import KINDS, LONGEST, questions
from headwater.config import ServeConfig
from headwater.draft.drafter import MTP_DRAFTS, Draft
from headwater.engine import mtp
from headwater.engine.engine import Engine
from headwater.engine.mtp import MtpRunner
from headwater.events import Event, TokenEvent
from headwater.models.files import embedded
from headwater.request import Generation, SamplingParams
from headwater.schedule.sequence import Sequence as AnySequence
from headwater.schedule.speculation import Speculator
from tests.exactness.rig import verify_every_draft

TOP_K, TREE = 4, 8
Ranks = tuple[int, ...]  # of the true tokens, 1, 2 … tokens ahead


class Watch:
    """The head's ranks of an answer's tokens, before each of its steps; the head goes on from the true tokens."""

    def __init__(self, answer: Sequence[int]) -> None:
        self.answer = answer
        self.found: dict[int, list[int]] = {}  # by the number of the answer's tokens before
        self._at = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Record while the answer is decoded."""
        guess = MtpRunner.guess

        def begun(runner: MtpRunner, wanted: Sequence[tuple[AnySequence, int]], least: float) -> list[Draft]:
            self._at = wanted[0][0].n_output
            self.found[self._at] = []
            return guess(runner, wanted, least)

        with patch.object(MtpRunner, "guess", begun), patch.object(mtp, "best_of", self._best_of):
            yield

    def _best_of(self, logits_SV: torch.Tensor) -> list[tuple[int, float]]:
        """Return the true token of the only sequence, and note its rank."""
        ranks = self.found[self._at]
        place = self._at + len(ranks)
        if place >= len(self.answer):
            return [(0, 0.0)]
        true = self.answer[place]
        ranks.append(int((logits_SV[0] > logits_SV[0, true]).sum()))
        return [(true, 1.0)]


def decoded(engine: Engine, prompt: list[int]) -> list[int]:
    """Return the greedy answer to a prompt."""
    tokens: list[int] = []
    asked = Asked(perf_counter())

    def on_event(event: Event) -> None:
        if isinstance(event, TokenEvent):
            tokens.append(event.token)
        asked.on_event(event)

    params = SamplingParams(max_tokens=LONGEST, temperature=0)
    engine.submit(Generation(tuple(prompt), params, keep_output=False), on_event)
    finished(asked)
    return tokens


def ranks(model: Model, prompts: Iterable[list[int]]) -> list[list[Ranks]]:
    """Return of each answer, by the number of its tokens before, the head's ranks of its next ones."""
    found = []
    with model.engines(mtp=replace(ServeConfig(), speculation="mtp")) as (engine,):
        verify_every_draft(engine.scheduler.speculation)
        # the head is asked before each step, and nothing that it says is verified
        engine.scheduler.speculation.worth = lambda drafts, rows, room: [0 for _ in drafts]  # type: ignore[method-assign]
        with patch.object(Speculator, "is_paused", lambda self, time_is_left: False):
            for prompt in prompts:
                watch = Watch(decoded(engine, prompt))
                with watch():
                    decoded(engine, prompt)
                    settle(engine)
                of_answer = {at: tuple(ranks) for at, ranks in watch.found.items()}
                found.append([of_answer.get(at, ()) for at in range(len(watch.answer))])
    return found


def best_tree(answers: Iterable[list[Ranks]], drafts: int) -> frozenset[Ranks]:
    """Return the paths of ranks that were right most often; a path's beginnings were right no less often."""
    right = Counter(
        ranks[:depth]
        for answer in answers
        for ranks in answer
        for depth in range(1, len(ranks) + 1)
        if max(ranks[:depth]) < TOP_K
    )
    order = sorted(right, key=lambda path: (-right[path], len(path), path))
    return frozenset(order[:drafts])


def tokens_a_step(answers: Iterable[list[Ranks]], tree: frozenset[Ranks]) -> float:
    """Return the mean of decoding with a tree of drafts: its accepted drafts, and the step's own token."""
    tokens = steps = 0
    for answer in answers:
        at = 0
        while at < len(answer):
            ranks = answer[at]
            at += 1 + max(depth for depth in range(len(ranks) + 1) if not depth or ranks[:depth] in tree)
            steps += 1
        tokens += len(answer)
    return tokens / steps


def share(answers: Iterable[list[Ranks]], depth: int, rank: int) -> float:
    """Return how often `rank` is right `depth` tokens ahead; for a rank above 0, of the places where 0 is not."""
    of_depth = [
        ranks[depth - 1]
        for answer in answers
        for ranks in answer
        if len(ranks) >= depth and not any(ranks[: depth - 1])
    ]
    judged = [found for found in of_depth if rank == 0 or found]
    return sum(found == rank for found in judged) / max(1, len(judged))


def rows_of(kind: str, answers: list[list[Ranks]]) -> Iterator[Row]:
    """Yield the rows of one kind of answers."""
    label = f"{len(answers)} answers ({kind})"
    for depth in range(1, MTP_DRAFTS + 1):
        yield Row(f"{label}: first choice is right, {depth} ahead", "%", [100 * share(answers, depth, 0)])
        yield Row(f"{label}: else the second is, {depth} ahead", "%", [100 * share(answers, depth, 1)])
    for drafts in range(1, MTP_DRAFTS + 1):
        chain = frozenset((0,) * depth for depth in range(1, drafts + 1))
        yield Row(f"{label}: chain of {drafts}, tokens a step", "", [tokens_a_step(answers, chain)])
    for drafts in (MTP_DRAFTS, TREE):
        tree = best_tree(answers, drafts)
        yield Row(f"{label}: best tree of {drafts}, tokens a step", "", [tokens_a_step(answers, tree)])


def main() -> None:
    parser = measure.parser(__doc__, "draft_trees", repeats=1)
    parser.add_argument("--items", type=int, default=60, help="questions of each kind")
    given = measure.prepared(parser)
    if given.small:
        given.items = 2
    model = Model(embedded(), "auto", mtp=True)
    rows = [row for kind in KINDS for row in rows_of(kind, ranks(model, questions(model.loaded, kind, given.items)))]
    measure.report(given, rows)


if __name__ == "__main__":
    main()
