"""Output tokens a second of servers that are up, of the embedded model's answers: with drafts and without, any engine.

    python -m benchmarks.peer_answers NAME=PORT ... [--items 30] [--clients 1,8] [--small]

Every server serves the embedded model, in a form of its own, on a port of this machine. The prompts are held-out
questions and tool calls as tokens, of which all but the last token is cached before. The servers take turns; every
server's figure is compared with the first one's. Without servers, this tree's serves with drafts and without.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from time import perf_counter, sleep

from benchmarks import measure
from benchmarks.measure import Row
from benchmarks.mtp import KINDS, LONGEST, questions
from benchmarks.peers import compared
from benchmarks.servers import complete, serve
from headwater.models.files import embedded
from headwater.models.load import load_model

PAUSE_AFTER = 0.5  # seconds of no requests before a figure


def named_port(text: str) -> tuple[str, int]:
    """Read NAME=PORT. Raises ArgumentTypeError."""
    name, _, port = text.partition("=")
    if not (name and port.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PORT")
    return name, int(port)


def rate(port: int, prompts: list[list[int]], clients: int) -> float:
    """Return output tokens a second with `clients` answers at once."""
    for prompt in prompts:
        complete(port, prompt)
    sleep(PAUSE_AFTER)
    begun = perf_counter()
    with ThreadPoolExecutor(clients) as at_once:
        answers = list(at_once.map(lambda prompt: complete(port, prompt, LONGEST, ignore_eos=False), prompts))
    seconds = perf_counter() - begun
    return sum(answer.usage["completion_tokens"] for answer in answers) / seconds


def main() -> None:
    parser = measure.parser(__doc__, "peer_answers", repeats=3)
    parser.add_argument("servers", nargs="*", type=named_port, metavar="NAME=PORT")
    parser.add_argument("--items", type=int, default=30, help="questions of each kind")
    parser.add_argument("--clients", type=measure.numbers, default=(1, 8))
    given = measure.prepared(parser)
    if given.small:
        given.items, given.clients = 2, (1,)
    loaded, rows = load_model(embedded()), list[Row]()
    with ExitStack() as stack:
        servers = dict(given.servers)
        if not servers:
            for name in ("off", "auto"):
                servers[name] = stack.enter_context(serve(str(embedded()), "--speculation", name)).port
        for kind in KINDS:
            prompts = questions(loaded, kind, given.items)
            for clients in given.clients:
                work: dict[str, Callable[[], float]] = {
                    name: partial(rate, port, prompts, clients) for name, port in servers.items()
                }
                figures = measure.in_turns(work, given.repeats)
                name = f"{len(prompts)} answers ({kind}), {clients} at once"
                rows += [Row(f"{name}: {server}", "tokens/s", values) for server, values in figures.items()]
                rows += compared(name, "tokens/s", figures)
    measure.report(given, rows)


if __name__ == "__main__":
    main()
