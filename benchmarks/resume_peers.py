"""Time to the first token of resumed prompts over HTTP, in turns with llama.cpp: the same prompt again, and next turns.

    python -m benchmarks.resume_peers --model FOLDER --peers FOLDER "NAME=WHERE MODEL [FLAGS]" ...
        [--after 500,2000,8000] [--new 1,8,32,128] [--lengths 512,2048,8192] [--repeats 3]

Servers are named as for `benchmarks.peers`, and take turns in one run. For each length, a conversation of one prompt
and its answer continues with 1 to 128 new tokens, each time right after that answer; then, with the new tokens that
its length has more, it is a prompt that is sent again. Prompts are token ids. Each turn has the tokens that it
computed; *above HTTP* is the time to the first token, less that of the same request if it is refused for the length of
its answer, after all that precedes the engine. Goals hold a server of Headwater against the peer that follows it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from tokenizers import Tokenizer

from benchmarks import measure
from benchmarks.measure import Row, ratios
from benchmarks.peers import Running, all_started, cached_of, report, servers_parser, servers_read
from benchmarks.servers import Streamed, refusal_seconds

ANSWER = 8  # tokens of the answer before a next turn
MAX_RATIO_AGAIN, MAX_RATIO_TURN = 0.2, 0.6  # of the time to the first token to the peer's
MAX_MS_ABOVE_HTTP = 15
SMALL = {"after": (100,), "new": (8,), "lengths": (128,)}


@dataclass
class Resumed:
    """A conversation with one server: a prompt, its answer, and longer prompts that begin with both."""

    server: Running
    prompt: list[int]
    history: list[int]  # with the answer
    longer: list[int]
    refused: list[float] = field(default_factory=list)  # milliseconds of requests without the engine

    @classmethod
    def begun(cls, server: Running, tokenizer: Tokenizer, after: int, length: int) -> Resumed:
        """Let the server compute a prompt, such that it has `after` tokens with its answer. Raises RuntimeError."""
        prompt = server.prompt(after - ANSWER)
        answer = server.ask(prompt, ANSWER).text
        history = prompt + tokenizer.encode(answer, add_special_tokens=False).ids
        if len(history) != after:
            raise RuntimeError(f"{server.name}: {answer!r} has {len(history) - len(prompt)} tokens, not {ANSWER}")
        return cls(server, prompt, history, history + server.prompt(length - after))

    def turn(self, n_new: int) -> Streamed:
        """Answer the next turn, right after the answer before it."""
        self.server.ask(self.prompt, ANSWER)
        return self.server.ask(self.history + self.server.prompt(n_new))

    def again(self) -> Streamed:
        """Answer the longest prompt, which was sent before; Headwater also refuses it once."""
        if self.server.is_ours:
            self.refused.append(1e3 * refusal_seconds(self.server.port, self.longer))
        return self.server.ask(self.longer, 2)


Answers = dict[str, list[Streamed]]  # by server, a turn each


def in_turns(talks: Sequence[Resumed], repeats: int, request: Callable[[Resumed], Streamed]) -> Answers:
    answers: Answers = {talk.server.name: [] for talk in talks}

    def one(talk: Resumed) -> float:
        answers[talk.server.name].append(request(talk))
        return 0.0

    measure.in_turns({talk.server.name: partial(one, talk) for talk in talks}, repeats, warm_up=False)
    return answers


def first_tokens(name: str, talks: Sequence[Resumed], answers: Answers, max_ratio: float) -> Iterator[Row]:
    """Yield the times to the first token, and of each server of Headwater the ratio to the peer that follows it."""
    name, times = f"{name}: first token", {server: [1e3 * a.ttft for a in of] for server, of in answers.items()}
    yield from (Row(f"{name}: {server}", "ms", of) for server, of in times.items())
    for ours, peer in pairwise(talk.server for talk in talks):
        if ours.is_ours and not peer.is_ours:
            ratio = ratios(times[ours.name], times[peer.name])
            yield Row(f"{name}: {ours.name} / {peer.name}", "x", ratio, f"<= {max_ratio}")


def turn_rows(talks: Sequence[Resumed], repeats: int, after: int, n_new: int) -> Iterator[Row]:
    """Yield the rows of next turns with this number of new tokens."""
    answers = in_turns(talks, repeats, lambda talk: talk.turn(n_new))
    name = f"{n_new} new token{'s' * (n_new > 1)} after {after:,}"
    yield from first_tokens(name, talks, answers, MAX_RATIO_TURN)
    yield from computed_rows(name, talks, answers, n_new)


def computed_rows(name: str, talks: Sequence[Resumed], answers: Answers, most: int) -> Iterator[Row]:
    for talk in talks:
        server = talk.server
        computed = [float(a.usage["prompt_tokens"] - cached_of(a)) for a in answers[server.name]]
        yield Row(f"{name}: computed: {server.name}", "tokens", computed, f"<= {most}" if server.is_ours else "")


def again_rows(talks: Sequence[Resumed], repeats: int, length: int) -> Iterator[Row]:
    """Yield the rows of a prompt that is sent again."""
    for talk in talks:
        talk.server.ask(talk.longer)
    answers = in_turns(talks, repeats, Resumed.again)
    name = f"the same {length:,} tokens"
    yield from first_tokens(name, talks, answers, MAX_RATIO_AGAIN)
    for server, of in answers.items():
        second = [1e3 * (answer.times[0][-1] - answer.sent) for answer in of]
        yield Row(f"{name}: second token: {server}", "ms", second)
    yield from computed_rows(name, talks, answers, 0)
    for talk in (talk for talk in talks if talk.server.is_ours):
        above = [1e3 * a.ttft - ms for a, ms in zip(answers[talk.server.name], talk.refused, strict=True)]
        yield Row(f"{name}: HTTP: {talk.server.name}", "ms", talk.refused)
        yield Row(f"{name}: first token above HTTP: {talk.server.name}", "ms", above, f"<= {MAX_MS_ABOVE_HTTP}")


def rows_of(servers: Sequence[Running], tokenizer: Tokenizer, given: argparse.Namespace) -> Iterator[Row]:
    for after, length in zip(given.after, given.lengths, strict=True):
        talks = [Resumed.begun(server, tokenizer, after, length) for server in servers]
        for n_new in given.new:
            yield from turn_rows(talks, given.repeats, after, n_new)
        yield from again_rows(talks, given.repeats, length)


def main() -> None:
    parser = servers_parser(__doc__, "resume_peers")
    parser.add_argument("--after", type=measure.numbers, default=(500, 2000, 8000), help="tokens before a next turn")
    parser.add_argument("--new", type=measure.numbers, default=(1, 8, 32, 128), help="new tokens of a next turn")
    parser.add_argument("--lengths", type=measure.numbers, default=(512, 2048, 8192), help="of prompts sent again")
    parser.add_argument("--about", default="", help="the model, as the page of results names it")
    given = servers_read(parser)
    if given.small:
        vars(given).update(SMALL)
    rows = []
    with all_started(given) as (servers, tokenizer, model):
        for row in rows_of(servers, tokenizer, given):
            print(f"{row.name}, {row.unit}: {row.values}", flush=True)
            rows.append(row)
    report(given, rows, servers, model=model.name, about=given.about or model.name)


if __name__ == "__main__":
    main()
