"""Benchmark of drafters: how many tokens of recorded answers they guess, and the time that a guess takes.

    python -m benchmarks.drafting --data FOLDER [--count 50] [--drafted 2,4,8] [--small]

Edits: successive versions of system prompts; the older one is the prompt, the newer one the answer. Chats: replies of
dialogues, each after all that was said before; past answers are those of the dialogues before. Tokens are the embedded
model's. Rows are named by work, drafter and the most tokens of a draft. A step yields the accepted tokens and one more;
without a drafter it yields 1. Nothing is computed by a model.
"""

from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import zstandard
from tokenizers import Tokenizer

from benchmarks import measure
from benchmarks.measure import Row
from headwater.draft.drafter import Draft, Drafter, steps_of
from headwater.draft.ngram import PromptLookup
from headwater.draft.suffix import PastAnswers, SuffixDrafter
from headwater.models.files import embedded

SHORTEST, LONGEST = 100, 4000  # tokens of an edit's answer
SMALL_COUNT = 2


@dataclass(frozen=True)
class Asked:
    """A prompt and the answer that it had."""

    prompt: list[int]
    answer: list[int]


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a compressed file."""
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as raw:
        yield from map(json.loads, io.TextIOWrapper(raw, encoding="utf-8"))


def edits(data: Path, tokenizer: Tokenizer, count: int, rng: random.Random) -> list[Asked]:
    """Return pairs of successive versions of different prompts."""
    families: dict[str, list[str]] = {}
    for record in records(data / "prompts_claude_code" / "families.jsonl.zst"):
        families.setdefault(record["family"], []).append(record["text"])
    found: list[Asked] = []
    for family in rng.sample(sorted(families), len(families)):
        for old, new in pairwise(families[family]):
            asked = Asked(*(tokenizer.encode(text).ids for text in (old, new)))
            if SHORTEST <= len(asked.answer) <= LONGEST:
                found.append(asked)
                break
        if len(found) == count:
            break
    return found


def chats(data: Path, tokenizer: Tokenizer, count: int, rng: random.Random) -> list[Asked]:
    """Return all replies of dialogues, in their order."""
    found = []
    for session in rng.sample(list(records(data / "mtbench101" / "sessions.jsonl.zst")), count):
        for n in session["calls"]:
            before = "\n".join(message["content"] for message in session["messages"][:n])
            answer = tokenizer.encode(session["messages"][n]["content"]).ids
            found.append(Asked(tokenizer.encode(before).ids, answer))
    return found


class Timed:
    """A drafter, and the seconds that its proposals took."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.seconds = drafter, 0.0
        self.take = drafter.take

    def propose(self, most: int) -> Draft:
        """Propose as the drafter does."""
        begun = time.perf_counter()
        draft = self.drafter.propose(most)
        self.seconds += time.perf_counter() - begun
        return draft


def rows_of(kind: str, work: list[Asked], drafted: tuple[int, ...]) -> Iterator[Row]:
    past = PastAnswers()
    drafters: dict[str, Callable[[list[int]], Drafter]] = {
        "ngram": PromptLookup,
        "suffix": lambda prompt: SuffixDrafter(past, "", prompt),
    }
    for name, drafter_of in drafters.items():
        for most in drafted:
            past = PastAnswers()
            steps: list[tuple[int, int]] = []
            seconds = 0.0
            for asked in work:
                drafter = Timed(drafter_of(asked.prompt))
                steps += steps_of(drafter, asked.answer, most)
                seconds += drafter.seconds
                past.add("", asked.answer)
            label = f"{kind}, {name}, {most}"
            n_drafted, right = (sum(numbers) for numbers in zip(*steps, strict=True))
            yield Row(f"{label}: tokens a step", "", [fmean(right + 1 for _, right in steps)])
            yield Row(f"{label}: accepted", "%", [100 * right / max(1, n_drafted)])
            yield Row(f"{label}: a proposal", "µs", [1e6 * seconds / len(steps)])


def main() -> None:
    parser = measure.parser(__doc__, "drafting", repeats=1)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with recorded traffic")
    parser.add_argument("--count", type=int, default=50, help="edits, and dialogues")
    parser.add_argument("--drafted", type=measure.numbers, default=(2, 4, 8), help="tokens of a draft at most")
    given = measure.prepared(parser)
    tokenizer = Tokenizer.from_file(str(embedded() / "tokenizer.json"))
    count = SMALL_COUNT if given.small else given.count
    rows: list[Row] = []
    for kind, read in (("edits", edits), ("chats", chats)):
        work = read(given.data, tokenizer, count, random.Random(given.seed))
        rows += rows_of(f"{len(work)} {kind}", work, given.drafted)
    measure.report(given, rows, count=count)


if __name__ == "__main__":
    main()
