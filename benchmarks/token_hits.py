"""Hit rates in tokens, against the longest common prefixes with all that was sent and answered before; differing bits.

    python -m benchmarks.token_hits [--model FOLDER] [--dtype bfloat16] [--only chat,shared,agents,stripped] [--small]

The scenarios of docs/comparison.md over HTTP: one conversation; a shared prefix; several agents at once with one system
prompt; a conversation whose reasoning is stripped from its history. Agents send each turn at once; the other clients
wait until the server is idle, as a user reads the answer. *Possible* is what a cache of infinite size that resumes at
any token could serve: for each request, the longest prefix of its prompt with which a request began that was sent
before it, or such a prompt with its finished answer.

Two parts of the difference have rows of their own. No cache knows where prompts of token ids part before the second one
of them arrives. And a turn that comes before the answer was prefilled computes it instead: the same work at another
time. Each repetition has a namespace of its own. Afterwards each request is answered again without anything cached, and
a token or log probability that differs counts.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai

from benchmarks import measure
from benchmarks.chat_load import PATIENCE, Record, Watched, chat_checkpoint
from benchmarks.engines import Model, settle
from benchmarks.measure import Row
from benchmarks.servers import ServerThread
from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.events import Event, FailedEvent, FinishedEvent

MAX_LOST_POINTS = 0.5  # of the possible hit rate
ANSWER, REASONING = 32, 64  # tokens


@dataclass(frozen=True)
class Sizes:
    """Sizes of all scenarios; lengths are in tokens."""

    turns: int = 12  # of the chat
    stripped_turns: int = 8
    agents: int = 8
    agent_turns: int = 6
    system: int = 400
    agents_system: int = 1500
    question: int = 150
    shared: int = 3000
    unique: int = 1000
    sharing: int = 5  # requests of a shared prefix
    prefixes: int = 2


SMALL = Sizes(3, 3, 2, 2, 100, 150, 30, 150, 50, 3, 1)


@dataclass
class Clients:
    """The clients of one repetition: they share a namespace."""

    client: openai.OpenAI
    model: Model
    engine: Engine
    salt: str
    sizes: Sizes

    def text(self, key: str, n_tokens: int) -> str:
        """Return a text of about that many tokens, the same for a key."""
        return self.model.loaded.tokenizer.decode(self._ids(key, n_tokens)).strip()

    def _ids(self, key: str, n_tokens: int) -> list[int]:
        return self.model.prompt(random.Random(f"{self.salt}, {key}"), n_tokens)

    def chat(self) -> None:
        self._conversation("chat", self.sizes.turns, self.sizes.system)

    def stripped(self) -> None:
        self._conversation("stripped", self.sizes.stripped_turns, self.sizes.system, reasoning=REASONING)

    def agents(self) -> None:
        with ThreadPoolExecutor(self.sizes.agents) as pool:
            turns, system = self.sizes.agent_turns, self.sizes.agents_system
            names = [f"agent {number}" for number in range(self.sizes.agents)]
            for done in [pool.submit(self._conversation, name, turns, system, pauses=False) for name in names]:
                done.result(PATIENCE)

    def shared(self) -> None:
        for prefix in range(self.sizes.prefixes):
            begin = self._ids(f"prefix {prefix}", self.sizes.shared)
            for number in range(self.sizes.sharing):
                prompt = begin + self._ids(f"unique {prefix}, {number}", self.sizes.unique)
                self.client.completions.create(prompt=prompt, logprobs=1, **self._options(ANSWER))
                settle(self.engine)

    def _conversation(self, name: str, turns: int, system: int, reasoning: int = 0, pauses: bool = True) -> None:
        """Hold a conversation whose history has the last words of each answer, without its reasoning."""
        messages: list[Any] = [{"role": "system", "content": self.text("system", system)}]
        options = self._options(reasoning + ANSWER)
        options["extra_body"]["chat_template_kwargs"] = {"enable_thinking": bool(reasoning)}
        for turn in range(turns):
            messages.append({"role": "user", "content": self.text(f"{name}, {turn}", self.sizes.question)})
            answer = self.client.chat.completions.create(messages=messages, logprobs=True, **options).choices[0].message
            words = ((answer.content or "") + (getattr(answer, "reasoning_content", None) or "")).split()
            messages.append({"role": "assistant", "content": " " + " ".join(words[reasoning:])})
            if pauses:
                settle(self.engine)

    def _options(self, max_tokens: int) -> dict[str, Any]:
        body = {"cache_salt": self.salt, "ignore_eos": True}
        return {"model": "any", "max_tokens": max_tokens, "temperature": 0, "extra_body": body}


SCENARIOS: dict[str, Callable[[Clients], None]] = {
    "chat": Clients.chat,
    "shared": Clients.shared,
    "agents": Clients.agents,
    "stripped": Clients.stripped,
}


def differing(watched: Watched, record: Record) -> int:
    """Answer a request again without anything cached; return whether a bit of the answer differs, as a number."""
    done, errors = threading.Event(), list[Exception]()

    def on_event(event: Event) -> None:
        if isinstance(event, FailedEvent):
            errors.append(event.error)
        if isinstance(event, FailedEvent | FinishedEvent):
            done.set()

    again = replace(record.generation, namespace=f"again {len(watched.records)}", keep_output=False)
    watched.submit(again, on_event)
    if not done.wait(PATIENCE) or errors:
        raise RuntimeError(f"no second answer: {errors or f'{PATIENCE} seconds'}")
    reference = watched.records[-1]
    if reference.account is None or reference.account.cached_tokens:
        raise RuntimeError(f"a prompt in a namespace of its own hit: {reference.account}")
    return int(reference.answer != record.answer)


def first_partings(records: list[Record]) -> list[Record]:
    """Return the requests without known boundaries that leave an earlier text where no request left one before."""
    left, found = {tuple[int, ...]()}, list[Record]()
    for record in records:
        shared = record.prompt[: record.known]
        if not record.generation.boundaries.known and shared not in left:
            found.append(record)
        left |= {shared, record.text}  # the end of a text is where the next turn leaves it
    return found


def rows_of(name: str, by_run: list[list[Record]], differ: list[int]) -> Iterator[Row]:
    """Yield the rows of one scenario, with a value for each repetition."""

    def share(tokens: Callable[[Record], int]) -> list[float]:
        return [100 * sum(map(tokens, of)) / sum(len(record.prompt) for record in of) for of in by_run]

    parting = {id(record) for records in by_run for record in first_partings(records)}

    def early(record: Record) -> int:
        return 0 if id(record) in parting else min(record.lost, record.known - record.sent)

    def rest(record: Record) -> int:
        return 0 if id(record) in parting else record.lost - early(record)

    lost, goal = f"{name}: possible - measured", f"<= {MAX_LOST_POINTS}"
    yield Row(f"{name}: hits", "% of tokens", share(lambda record: len(record.prompt) - record.computed))
    yield Row(f"{name}: possible hits", "% of tokens", share(lambda record: record.known))
    yield Row(lost, "points", share(lambda record: record.lost), goal)
    yield Row(f"{lost}, where prompts first part", "points", share(lambda r: r.lost if id(r) in parting else 0))
    yield Row(f"{lost}, turns before their answer was prefilled", "points", share(early))
    yield Row(f"{lost}, the rest", "points", share(rest), goal)
    yield Row(f"{name}: answers with a differing bit", "requests", differ, "<= 0")


def main() -> None:
    parser = measure.parser(__doc__, "token_hits", repeats=1)
    parser.add_argument("--model", type=Path, help="folder of the checkpoint; a random one by default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SCENARIOS), help="scenarios")
    parser.add_argument("--list", action="store_true", help="print each request")
    given = measure.prepared(parser)
    sizes, rows, config = SMALL if given.small else Sizes(), list[Row](), ServeConfig(memory=2 * 10**9)
    with ExitStack() as stack:
        model = Model(given.model or stack.enter_context(chat_checkpoint()), given.dtype)
        (engine,) = stack.enter_context(model.engines(only=config))
        watched = Watched(engine)
        server = stack.enter_context(ServerThread(watched, config))
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", timeout=PATIENCE)
        for name in given.only:
            by_run = []
            for run in range(given.repeats):
                begun = len(watched.records)
                SCENARIOS[name](Clients(client, model, engine, f"{name}, {given.seed}, {run}", sizes))
                settle(engine)
                by_run.append(watched.records[begun:])
                for record in by_run[-1] if given.list else ():
                    print(f"{name}: {len(record.prompt)} tokens, {record.known} known, {record.account}")
            differ = [sum(differing(watched, record) for record in records) for records in by_run]
            rows += rows_of(name, by_run, differ)
    measure.report(given, rows, model=given.model.name if given.model else "random", dtype=given.dtype)


if __name__ == "__main__":
    main()
