"""`headwater demo`: the embedded model's answers with the cache and without it, and the time that it saves."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from headwater import machine
from headwater.cli.common import commands, progress_console
from headwater.cli.demo_documents import QUESTIONS, archive
from headwater.cli.extras import require
from headwater.errors import HeadwaterError
from headwater.load.answer import Answer
from headwater.load.endpoint import CHAT, Client, ServerError, refusal_text, streamed
from headwater.load.session import Message
from headwater.models.profiles import PROFILES

STALL_SECONDS = 600  # without a line of a server that starts
STOP_SECONDS = 15
ANSWER_TOKENS = 24
BAR_CHARACTERS = 40
TURNS, CLIENTS = 10, 8
ARCHIVES = {2_000: (88, 1), 8_000: (406, 3_000), 4_000: (200, 6_000)}  # tokens -> entries, and the first one's day
INHERITED_VARIABLES = ("HEADWATER_DEVICE", "HEADWATER_THREADS", "HEADWATER_CACHE_DIR")  # for the servers
SHOWN = re.compile(r"Proving|\d+ of \d+ checks")  # of the lines of a server that starts
LISTENS = re.compile(r"serves \S+ on (http\S+)")
NEXT_MODEL, NEXT_PROFILE, NEXT_MEMORY = "LiquidAI/LFM2.5-8B-A1B", "lfm2.5-8b-a1b", "4GB"

console = Console(highlight=False, soft_wrap=True)


class ServerFailed(HeadwaterError):
    """A server of the demo ended, or made no progress; the message has its last lines."""


@dataclass(frozen=True)
class Asked:
    """A question, and its answers with the cache and without it. Times are seconds to the first token."""

    question: str
    right: str
    answer: str
    plain_answer: str
    seconds: float
    plain_seconds: float
    tokens: int  # of the prompt
    cached: int


@dataclass
class Demo:
    """Clients of a server with a cache and of one without, and the questions so far."""

    cached: Client
    plain: Client
    asked: list[Asked] = field(default_factory=list)

    def ask(self, messages: Sequence[Message], right: str) -> Asked:
        """Ask both servers, one after the other, and print the answer and two bars."""
        question = messages[-1]["content"]
        console.print(f"\n  {escape(question)} ", end="")
        with_cache, seconds = first_token(self.cached, messages, lambda text: console.print(text, end="", style="bold"))
        console.print()
        without, plain_seconds = first_token(self.plain, messages)
        tokens, cached = with_cache.prompt_tokens or 0, with_cache.cached_tokens or 0
        found = Asked(question, right, with_cache.text, without.text, seconds, plain_seconds, tokens, cached)
        self.asked.append(found)
        bars(plain_seconds, seconds, f"{cached:,} of {tokens:,} tokens known")
        return found

    def documents(self) -> None:
        """Ask five questions about a document, of two lengths."""
        for tokens in (8_000, 2_000):
            heading(f"One document of {tokens:,} tokens, five questions")
            for question, right in QUESTIONS[:5]:
                self.ask([archive(*ARCHIVES[tokens]), user(question)], right)

    def chat(self) -> None:
        """Hold a conversation of TURNS turns, which sends the whole history with each turn."""
        heading(f"A chat of {TURNS} turns, about a document of 4,000 tokens")
        messages = [archive(*ARCHIVES[4_000])]
        for question, right in QUESTIONS[:TURNS]:
            messages.append(user(question))
            messages.append({"role": "assistant", "content": self.ask(messages, right).answer})

    def clients(self) -> None:
        """Let CLIENTS clients ask about one document, which is new, at once."""
        heading(f"{CLIENTS} clients at once, about one document that is new to the server")
        prompts = [[archive(88, 9_000), user(question)] for question, _ in QUESTIONS[:CLIENTS]]
        seconds, answers = zip(*(together(client, prompts) for client in (self.cached, self.plain)), strict=True)
        console.print()
        cached, tokens = (sum(getattr(a, n) or 0 for a, _ in answers[0]) for n in ("cached_tokens", "prompt_tokens"))
        bars(seconds[1], seconds[0], f"all answered; {cached:,} of {tokens:,} tokens known")
        for (question, right), (one, ttft), (other, plain_ttft) in zip(QUESTIONS, *answers, strict=False):
            counts = one.prompt_tokens or 0, one.cached_tokens or 0
            self.asked.append(Asked(question, right, one.text, other.text, ttft, plain_ttft, *counts))

    def summary(self) -> bool:
        """Print the savings and the wrong answers; return whether all answers are the same without the cache."""
        asked, same = self.asked, sum(one.answer == one.plain_answer for one in self.asked)
        seconds, plain = sum(one.seconds for one in asked), sum(one.plain_seconds for one in asked)
        tokens, cached = sum(one.tokens for one in asked), sum(one.cached for one in asked)
        heading("Together")
        console.print(f"  The same answers without the cache, to the letter: [bold]{same} of {len(asked)}[/].")
        console.print(f"  Prompt tokens that were not computed: {cached:,} of {tokens:,} ({cached / tokens:.0%}).")
        console.print(
            f"  Seconds to first tokens: {seconds:.1f} instead of {plain:.1f}, [bold]{plain - seconds:.1f} saved[/]."
        )
        for one in asked:
            if one.answer != one.plain_answer:
                console.print(
                    f"  [red]Different:[/] {escape(repr(one.answer)[:30])}, {escape(repr(one.plain_answer)[:30])}"
                )
        wrong = {(one.question, one.answer, one.right) for one in asked if not is_right(one)}
        if wrong:
            console.print("\n  The small model's own mistakes, the same without the cache:")
        for question, answer, right in sorted(wrong):
            console.print(f"    {escape(question)} {escape(answer[:30])} [dim](right: {right})[/]")
        return same == len(asked)


def is_right(asked: Asked) -> bool:
    """Return whether an answer is the right one."""
    return asked.answer.rstrip(".") == asked.right


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def heading(text: str) -> None:
    console.print(f"\n[bold cyan]{text}[/]")


def bars(plain: float, seconds: float, note: str) -> None:
    """Print a bar for each time, side by side, and the factor between them."""
    most = max(plain, seconds)
    for name, one, more in (
        ("without", plain, ""),
        ("cache", seconds, f"  [bold green]{plain / seconds:.1f} x[/]" if seconds < plain else ""),
    ):
        length = max(1, round(BAR_CHARACTERS * one / most))
        console.print(f"    {name:<8}{'█' * length:<{BAR_CHARACTERS}} {one:6.2f} s{more}")
    console.print(f"    {'':<8}{note}", style="dim")


def first_token(
    client: Client, messages: Sequence[Message], show: Callable[[str], None] = lambda text: None
) -> tuple[Answer, float]:
    """Return a greedy answer, and the seconds to its first token; `show` gets its pieces. Raises ServerError."""
    fields = {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    body = streamed("default", {**fields, "chat_template_kwargs": {"enable_thinking": False}})
    answer, began = Answer(), time.perf_counter()
    with client.http.stream("POST", CHAT, json=body) as response:
        if response.status_code != 200:
            raise ServerError(refusal_text(response.read(), response.status_code))
        for chunk in response.iter_bytes():
            for piece in answer.feed(chunk, time.perf_counter()):
                show(piece.text)
    if answer.fault is not None:
        raise ServerError(answer.fault)
    return answer, (answer.first or time.perf_counter()) - began


def together(client: Client, prompts: Sequence[Sequence[Message]]) -> tuple[float, list[tuple[Answer, float]]]:
    """Return the seconds until all prompts, which are sent at once, are answered, and their answers."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: first_token(client, prompt), prompts))
    return time.perf_counter() - began, answers


@contextmanager
def served(*flags: str) -> Iterator[str]:
    """Start `headwater serve` with flags, and yield its URL once it has warmed up; stop it at the end.

    It may take any time to compile and to prove, as long as it lives and prints lines. Raises ServerFailed.
    """
    command = [sys.executable, "-m", "headwater", "serve", "--port", "0", "--memory", "1GB", "--log-level", "warning"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADWATER_") or k in INHERITED_VARIABLES}
    lines: queue.Queue[str] = queue.Queue()
    with subprocess.Popen(
        [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        threading.Thread(target=read_lines, args=(process, lines), daemon=True).start()
        try:
            yield url_of(lines)
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def read_lines(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    """Read all lines of a process, and an empty one at its end."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")


def url_of(lines: queue.Queue[str]) -> str:
    """Show a server's lines while it starts, and return its URL. Raises ServerFailed."""
    seen: list[str] = []
    with progress_console.status("starting") as status:
        while not (found := LISTENS.search(seen[-1] if seen else "")):
            try:
                line = lines.get(timeout=STALL_SECONDS)
            except queue.Empty:
                raise ServerFailed(f"the server printed nothing for {STALL_SECONDS} s after: {seen[-1:]}") from None
            if not line:
                raise ServerFailed(f"the server has ended: {' '.join(seen[-3:]).strip()}")
            seen.append(line)
            if SHOWN.match(line):
                status.update(line.strip()[:70])
            if not progress_console.is_terminal and "check" in line:
                console.print(f"  {line.strip()[:70]}", style="dim")
    return found[1]


def next_steps() -> None:
    """Print commands to type next, with what a larger model needs here."""
    own = Path(sys.executable).with_name("headwater")
    name = "headwater" if shutil.which("headwater") else os.path.relpath(own)
    weights = replace(PROFILES[NEXT_PROFILE], weights="int4").weight_bytes
    needed = weights + 4e9
    verdict = "enough" if needed < machine.total_memory() else "too little"
    heading("Next")
    console.print(f"  {name} serve")
    console.print("    # this model; then, in another terminal:", style="dim")
    console.print(f"  {name} chat")
    console.print("    # /demo gives it a document; in a browser: http://127.0.0.1:8000/chat", style="dim")
    console.print(f"  {name} serve {NEXT_MODEL} --weights int4 --memory {NEXT_MEMORY}")
    here = machine.in_units(machine.total_memory())
    console.print(
        f"    # a larger one: needs {machine.in_units(needed)}, this machine has {here}: {verdict}", style="dim"
    )


@commands.command()
def demo() -> None:
    """Show what the cache saves, with the embedded model.

    Asks about documents, chats, and serves eight clients, on two servers, one of which has no cache. The exit code is 1
    if an answer differs.
    """
    require("serve")
    console.print("Headwater starts with its embedded model. The first start on a machine compiles")
    console.print("kernels and proves that a hit changes no bit, which takes a minute or more.")
    with (
        served() as url,
        served("--no-cache") as plain_url,
        contextlib.closing(Client(url, None, None)) as cached,
        contextlib.closing(Client(plain_url, None, None)) as plain,
    ):
        shown = Demo(cached, plain)
        shown.documents()
        shown.chat()
        shown.clients()
    is_same = shown.summary()
    next_steps()
    if not is_same:
        raise typer.Exit(1)
