"""The model's head of multi-token prediction: how far it drafts, what that saves, and what it costs a prompt.

    python -m benchmarks.mtp [--model FOLDER] [--items 60] [--clients 1,8] [--small]

Answers are the embedded model's own, to held-out questions about documents, and tool calls: greedy, cached prompts. A
window is a number of drafts that every step verifies, whether they pay or not; `mtp` and `auto` take as many as pay.
Tokens a step have the step's own among them. The turns of all ways are interleaved.

Cold prompts are of `--model`, or of a random model, with a random head: the time to the first token with the head,
which writes entries of the prompt's last step after that token, and without one.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from time import perf_counter

from benchmarks import measure
from benchmarks.engines import Asked, Model, ask, bench_checkpoint, finished, settle
from benchmarks.measure import Row, ratios
from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.evaluate.items import DEFAULT_TASKS, read_items
from headwater.models.files import embedded
from headwater.models.load import LoadedModel
from headwater.request import Drafting, Generation, SamplingParams
from headwater.server.prompt.encoding import encode
from headwater.server.prompt.template import ChatTemplate
from tests.checkpoints.mtp import FILE, add_head
from tests.exactness.rig import verify_every_draft

WINDOWS = (1, 2, 3, 4)
KINDS = ("single", "tool")
LONGEST = 64  # tokens of an answer
PROMPTS, SMALL_PROMPTS = (512, 2048), (128,)  # tokens


@dataclass
class Way:
    """One way of answering all questions."""

    engine: Engine
    drafting: Drafting
    always: bool = False  # all drafts are verified
    tokens: int = 0
    steps: int = 0

    def rate(self, prompts: list[list[int]], clients: int) -> float:
        """Output tokens a second, so many answers at once."""
        for prompt in prompts:
            ask(self.engine, prompt)
        speculation = self.engine.scheduler.speculation
        if self.always:
            verify_every_draft(speculation)
        before, begun = self.engine.stats().steps, perf_counter()
        with ThreadPoolExecutor(clients) as at_once:
            asked = list(at_once.map(self._answered, prompts))
        seconds, self.steps = perf_counter() - begun, self.engine.stats().steps - before
        self.tokens = sum(len(one.times) for one in asked)
        settle(self.engine)
        return self.tokens / seconds

    def _answered(self, prompt: list[int]) -> Asked:
        asked = Asked(perf_counter())
        params = SamplingParams(max_tokens=LONGEST, temperature=0)
        self.engine.submit(Generation(tuple(prompt), params, drafting=self.drafting, keep_output=False), asked.on_event)
        return finished(asked)


def questions(loaded: LoadedModel, kind: str, count: int) -> list[list[int]]:
    """Return prompts of held-out questions of a kind."""
    template = ChatTemplate(loaded.chat_template or "", loaded.special_tokens)
    items = [item for item in read_items(DEFAULT_TASKS) if item.kind == kind and item.tokens <= 512][:count]
    texts = (
        template.render([*item.messages], datetime(2026, 1, 1), {"tools": item.tools, "add_generation_prompt": True})
        for item in items
    )
    return [encode(loaded.tokenizer, text, add_special_tokens=False).ids for text in texts]


def answers(model: Model, count: int, clients: tuple[int, ...], turns: int) -> Iterator[Row]:
    """Yield rows of answers by each way."""
    config = ServeConfig()
    settings = {"off": config, "mtp": replace(config, speculation="mtp"), "auto": replace(config, speculation="auto")}
    windows = {f"window {n}": replace(config, speculation="mtp") for n in WINDOWS}
    with model.engines(**settings, **windows) as engines:
        ways = {name: Way(engine, Drafting()) for name, engine in zip((*settings, *windows), engines, strict=True)}
        for n in WINDOWS:
            ways[f"window {n}"].drafting, ways[f"window {n}"].always = Drafting(tokens=n), True
        for kind in KINDS:
            prompts = questions(model.loaded, kind, count)
            for at_once in clients:
                work: dict[str, Callable[[], float]] = {
                    name: partial(way.rate, prompts, at_once) for name, way in ways.items()
                }
                figures = measure.in_turns(work, turns)
                label = f"{len(prompts)} answers ({kind}), {at_once} at once"
                yield Row(f"{label}: off", "tokens/s", figures["off"])
                for name, way in ways.items():
                    if name != "off":
                        yield Row(f"{label}: {name} / off", "x", ratios(figures[name], figures["off"]))
                    yield Row(f"{label}: {name}, tokens a step", "", [way.tokens / way.steps])


@contextmanager
def with_head(folder: Path) -> Iterator[Path]:
    """Yield the folder of a checkpoint with a head: its own, or a random one in a copy."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / folder.name
        shutil.copytree(folder, copy)
        if (copy / FILE).exists():
            add_head(copy)
        yield copy


def cold(folder: Path, dtype: str, lengths: tuple[int, ...], turns: int, rng: random.Random) -> Iterator[Row]:
    """Yield rows of cold prompts with the head and without."""
    model = Model(folder, dtype, mtp=True)
    settings = {"off": ServeConfig(), "mtp": ServeConfig(speculation="mtp")}
    with model.engines(**settings) as engines:
        for length in lengths:
            work: dict[str, Callable[[], float]] = {
                name: partial(_ttft_ms, engine, model, rng, length)
                for name, engine in zip(settings, engines, strict=True)
            }
            figures = measure.in_turns(work, 3 * turns)
            yield Row(f"cold TTFT, {length:,} tokens: without a head", "ms", figures["off"])
            yield Row(
                f"cold TTFT, {length:,} tokens: with / without", "x", ratios(figures["mtp"], figures["off"]), "<= 1.02"
            )


def _ttft_ms(engine: Engine, model: Model, rng: random.Random, length: int) -> float:
    return 1e3 * ask(engine, model.prompt(rng, length)).ttft


def main() -> None:
    parser = measure.parser(__doc__, "mtp", repeats=3)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint, for cold prompts; without it, a random one")
    parser.add_argument("--dtype", default="auto", help="of --model")
    parser.add_argument("--items", type=int, default=60, help="questions of each kind")
    parser.add_argument("--clients", type=measure.numbers, default=(1, 8))
    given = measure.prepared(parser)
    if given.small:
        given.items, given.clients = 2, (1,)
    rng = random.Random(given.seed)
    rows = list(answers(Model(embedded(), "auto", mtp=True), given.items, given.clients, given.repeats))
    with ExitStack() as stack:
        folder = stack.enter_context(with_head(given.model or stack.enter_context(bench_checkpoint())))
        rows += cold(folder, given.dtype, SMALL_PROMPTS if given.small else PROMPTS, given.repeats, rng)
    measure.report(given, rows, model=given.model.name if given.model else "random", dtype=given.dtype)


if __name__ == "__main__":
    main()
