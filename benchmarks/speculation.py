"""Speed of decoding with drafts beside plain decoding, on recorded answers that both are made to give.

    python -m benchmarks.speculation --data FOLDER [--model FOLDER] [--clients 1,8] [--count 48] [--small]

Engines over one model: without drafts, and with each drafter. Sampling runs as ever; its token is then replaced by the
recorded answer's. Neither drafter nor server sees the answer before. Edits and chats are `benchmarks.drafting`'s, with
tokens modulo the model's vocabulary. Misleading prompts have each run of three tokens of the answer, followed by
another token than there: all drafts are wrong. Prompts are cached before. Each turn begins with new drafters, which
know nothing of earlier turns. The first turn is not counted: steps are recorded in it, and their seconds learned.
Take several answers for each client: with drafts some end early, and at the end the slowest one is decoded alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks import measure
from benchmarks.drafting import Asked, chats, edits
from benchmarks.engines import Model, ask, bench_checkpoint, finished, settle, submit
from benchmarks.measure import Row, ratios
from headwater.config import DTYPES, WEIGHTS, ServeConfig
from headwater.engine.engine import Engine
from headwater.engine.sampler import Choice
from headwater.engine.step_logits import StepLogits
from headwater.engine.verification import Verified
from headwater.models.files import embedded
from headwater.schedule.speculation import speculation_of

DRAFTERS = ("ngram", "suffix")
GOALS = {("edits", 1): ">= 1.9", ("edits", 8): ">= 1.3", ("chats", 1): ">= 0.98", ("misleading", 1): ">= 0.97"}
LONGEST = 1024  # tokens of a prompt
READ = 20  # times as many recorded answers are read as are taken: some prompts are too long


class Forced:
    """An engine whose answers are recorded ones, by their prompts."""

    def __init__(self, engine: Engine, drafter: str, work: list[Asked]) -> None:
        self.engine, self.drafter, self.work = engine, drafter, work
        self.answers = {tuple(asked.prompt): asked.answer for asked in work}
        self.steps = self.accepted = self.rejected = 0

    def rate(self, clients: int) -> float:
        """Output tokens a second, so many answers at once: the next one begins when one ends."""
        engine = self.engine
        sampled = engine.verification.choices

        def forced(logits: StepLogits, rows: list[int], reached: list[Verified]) -> list[Choice]:
            sampled(logits, rows, reached)
            return [Choice(self._next(one)) for one in reached]

        def answer(asked: Asked) -> None:
            finished(submit(engine, asked.prompt, len(asked.answer)))

        for asked in self.work:
            ask(engine, asked.prompt)
        speculation = speculation_of(self.drafter)
        speculation.seconds = engine.scheduler.speculation.seconds
        engine.scheduler.speculation = speculation
        before, begun = engine.stats().steps, time.perf_counter()
        engine.verification.choices = forced  # type: ignore[method-assign, assignment]
        try:
            with ThreadPoolExecutor(clients) as at_once:
                list(at_once.map(answer, self.work))
            seconds = time.perf_counter() - begun
            self.steps = engine.stats().steps - before
        finally:
            del engine.verification.choices
        self.accepted, self.rejected = engine.scheduler.speculation.accepted, engine.scheduler.speculation.rejected
        settle(engine)
        return sum(len(asked.answer) for asked in self.work) / seconds

    def _next(self, one: Verified) -> int:
        seq = one.live.seq
        return self.answers[seq.generation.prompt][seq.n_output]


def misleading(model: Model, count: int, outputs: int, rng: random.Random) -> list[Asked]:
    """Answers whose runs of three tokens stand in their prompts before another token."""
    found = []
    for _ in range(count):
        answer = model.prompt(rng, min(outputs, LONGEST // 4))
        runs = [[*answer[i - 3 : i], (answer[i] + 1) % model.loaded.spec.vocab_size] for i in range(3, len(answer))]
        found.append(Asked([token for run in runs for token in run], answer))
    return found


def cut(work: list[Asked], count: int, outputs: int, vocabulary: int) -> list[Asked]:
    """Return recorded answers with short prompts, in the model's vocabulary."""
    short = [asked for asked in work if len(asked.prompt) <= LONGEST and len(asked.answer) >= outputs // 4]
    prompts = {tuple(token % vocabulary for token in asked.prompt): asked.answer for asked in short}
    return [Asked(list(p), [token % vocabulary for token in a[:outputs]]) for p, a in list(prompts.items())[:count]]


def rows_of(kind: str, work: list[Asked], engines: list[Engine], clients: int, turns: int) -> list[Row]:
    forced = {name: Forced(engine, name, work) for name, engine in zip(("off", *DRAFTERS), engines, strict=True)}
    turn: dict[str, Callable[[], float]] = {name: partial(one.rate, clients) for name, one in forced.items()}
    for once in turn.values():
        once()
    figures = measure.in_turns(turn, turns)
    label, outputs = f"{len(work)} {kind}, {clients} at once", sum(len(asked.answer) for asked in work)
    rows = [Row(f"{label}: {name}", "tokens/s", figures[name]) for name in forced]
    for name in DRAFTERS:
        one = forced[name]
        drafts = one.accepted + one.rejected
        rows += [
            Row(f"{label}: {name} / off", "x", ratios(figures[name], figures["off"]), GOALS.get((kind, clients), "")),
            Row(f"{label}: {name}, accepted", "%", [100 * one.accepted / max(1, drafts)]),
            Row(f"{label}: {name}, drafts a step", "", [drafts / one.steps]),
            Row(f"{label}: {name}, tokens a step", "", [outputs / one.steps]),
        ]
    return rows


def main() -> None:
    parser = measure.parser(__doc__, "speculation", repeats=2)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with recorded traffic")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; without it, a random one")
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument("--weights", default="auto", choices=WEIGHTS)
    parser.add_argument("--clients", type=measure.numbers, default=(1, 8))
    parser.add_argument("--count", type=int, default=48, help="answers of each kind")
    parser.add_argument("--outputs", type=int, default=256, help="tokens of an answer at most")
    given = measure.prepared(parser)
    if given.small:
        given.count, given.outputs, given.clients = 2, 16, (2,)
    tokenizer, rng = Tokenizer.from_file(str(embedded() / "tokenizer.json")), random.Random(given.seed)
    with ExitStack() as stack:
        folder = given.model or stack.enter_context(bench_checkpoint())
        model = Model(folder, given.dtype, given.weights)
        spec = model.loaded.spec
        read = [
            (kind, of(given.data, tokenizer, READ * given.count, rng))
            for kind, of in (("edits", edits), ("chats", chats))
        ]
        work = {kind: cut(asked, given.count, given.outputs, spec.vocab_size) for kind, asked in read}
        work["misleading"] = misleading(model, given.count, given.outputs, rng)
        config = ServeConfig(decode_reuse="none")
        engines = stack.enter_context(model.engines(**dict.fromkeys(("off", *DRAFTERS), config)))
        rows = [
            row
            for kind, asked in work.items()
            for clients in given.clients
            for row in rows_of(kind, asked, engines, clients, given.repeats)
        ]
    name = given.model.name if given.model else "random"
    measure.report(given, rows, model=name, dtype=spec.dtype_name, weights=spec.weights_held, outputs=given.outputs)


if __name__ == "__main__":
    main()
