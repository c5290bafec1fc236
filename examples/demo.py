"""Demo: serves the embedded model and holds seven conversations with it, as clients do.

It prints each answer, whether it is right, and the cached tokens of its prompt. The exit code is 1 if a promise was
broken; a wrong answer breaks none.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from conversations import FACTS, NOT_THERE, ORDERS, TASKS, called, folders, message, tools
from openai import OpenAI, OpenAIError
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from headwater.cli.demo_documents import library

HOST = "127.0.0.1"
START_SECONDS = 60
ANSWER_TOKENS = 48
PAGE = 64
ASKED_ABOUT = 2  # documents that are recomputed at the default fidelity
SLACK = 2 * PAGE  # a boundary is floored to its page, and the generation prompt stands after it

console = Console()


class ServerFailed(Exception):
    """`headwater serve` ended, or did not answer in time."""


@dataclass(frozen=True)
class Asked:
    """A request from the client's point of view."""

    conversation: str
    what: str
    answer: str
    right: str | None  # the right answer, if there is one
    ttft: float  # seconds
    account: dict[str, Any]

    @property
    def prompt_tokens(self) -> int:
        return self.account["prompt_tokens"]

    @property
    def cached_tokens(self) -> int:
        return self.account["cached_tokens"]

    @property
    def is_right(self) -> bool | None:
        return None if self.right is None else self.answer.rstrip(".") == self.right.rstrip(".")


@dataclass
class Demo:
    """A client that keeps its requests, and the promises that the server broke."""

    client: OpenAI
    asked: list[Asked] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def ask(
        self,
        conversation: str,
        what: str,
        messages: list[dict[str, Any]],
        right: str | None,
        at_least: int = 0,
        **more: Any,
    ) -> Asked:
        """Stream one greedy answer. `at_least`: cached tokens promised."""
        thinking = more.pop("thinking", False)
        start, ttft, account = time.perf_counter(), None, None
        text, name, arguments = "", "", ""
        stream = self.client.chat.completions.create(
            model="default",
            messages=messages,
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"chat_template_kwargs": {"enable_thinking": thinking}},
            **more,
        )
        for chunk in stream:
            if chunk.choices and ttft is None:
                ttft = time.perf_counter() - start
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    name += call.function.name or ""
                    arguments += call.function.arguments or ""
            account = (chunk.model_extra or {}).get("headwater", account)
        answer = called(name, arguments) if name else text.strip()
        asked = Asked(conversation, what, answer, right, ttft or 0.0, account or {})
        self.asked.append(asked)
        self.expect(
            asked.cached_tokens >= at_least,
            f"{conversation}, {what}: {asked.cached_tokens:,} tokens cached, at least {at_least:,} promised",
        )
        return asked

    def expect(self, kept: bool, promise: str) -> None:
        if not kept:
            self.broken.append(promise)


def resend(demo: Demo) -> None:
    question = "What is the telephone extension of Polmira Palmore?"
    messages = [library(0), message("user", question)]
    first = demo.ask("resend", question, messages, "4471")
    again = demo.ask("resend", "the same again", messages, "4471", at_least=(first.prompt_tokens - 1) // PAGE * PAGE)
    demo.expect(first.answer == again.answer, "resend: a hit changed the answer")


def growing_chat(demo: Demo) -> None:
    questions = (
        ("Who is the mayor of Ravkeld?", "Berta Wesworth"),
        ("Which code is on the badge of Kanor Milstead?", "MK-227"),
        ("In which room does the thing stand that Berta Wesworth owns?", "the back barn"),
        ("In which year was Melport founded?", NOT_THERE),
    )
    messages, known = [library(2)], 0
    for question, right in questions:
        messages.append(message("user", question))
        asked = demo.ask("growing chat", question, messages, right, at_least=known)
        messages.append(message("assistant", asked.answer))
        known = asked.prompt_tokens - SLACK


def shared_documents(demo: Demo) -> None:
    """Ask about the same documents as two users: the second user's first question finds them cached."""
    conversation = "shared documents"
    ann, bob = "What is the price of the small clock?", "In which year was Lanby Works founded?"
    first = demo.ask(conversation, f"Ann: {ann}", [library(5), message("user", ann)], "310 crowns")
    known = first.prompt_tokens - SLACK
    demo.ask(conversation, f"Bob: {bob}", [library(5), message("user", bob)], "1931", at_least=known)


def documents_in_any_order(demo: Demo) -> None:
    """Reuse documents without a shared prefix, all but those that are relevant to the question."""
    for turn, (order, question, right) in enumerate(ORDERS):
        asked = demo.ask("documents in any order", question, folders(order, question), right)
        composed, promised = asked.account["segments"], len(order) - ASKED_ABOUT if turn else 0
        what = f"composed of {composed} segments, at least {promised} promised"
        demo.expect(composed >= promised, f"documents in any order, {question}: {what}")


def stripped_reasoning(demo: Demo) -> None:
    """Send the reasoning back together with its answer, as clients do; the template strips it."""
    conversation = "stripped reasoning"
    questions = (
        ("On which day was Kanor Milstead born?", "3 August"),
        ("Where does Simnor Palworth live?", "Dresdale"),
        ("What does Lanby Works sell?", "iron gates"),
    )
    messages, known = [library(8)], 0
    for question, right in questions:
        messages.append(message("user", question))
        asked = demo.ask(conversation, question, messages, right, at_least=known)
        messages.append(message("assistant", f"<think>\nI look for it in the documents.\n</think>\n\n{asked.answer}"))
        known = asked.prompt_tokens - SLACK


def memory(demo: Demo) -> None:
    messages, known = [message("system", "You are a helpful assistant.")], 0
    for said, right in FACTS:
        messages.append(message("user", said))
        asked = demo.ask("memory", said, messages, right, at_least=known)
        messages.append(message("assistant", asked.answer))
        known = asked.prompt_tokens - SLACK


def agent(demo: Demo) -> None:
    conversation = "agent with tools"
    messages, known = [message("system", "Call a tool when one is needed.")], 0
    for step, (task, name, arguments) in enumerate(TASKS):
        messages.append(message("user", task))
        right = called(name, json.dumps(arguments))
        asked = demo.ask(conversation, task, messages, right, at_least=known, tools=tools())
        call = {
            "id": f"call_{step}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        messages.append({**message("assistant", ""), "tool_calls": [call]})
        messages.append({**message("tool", '{"status": "done"}'), "tool_call_id": call["id"]})
        known = asked.prompt_tokens - SLACK
        asked = demo.ask(conversation, "(its result)", messages, "Done.", at_least=known, tools=tools())
        messages.append(message("assistant", asked.answer))


CONVERSATIONS = (
    resend,
    growing_chat,
    shared_documents,
    documents_in_any_order,
    stripped_reasoning,
    memory,
    agent,
)


@contextmanager
def served() -> Iterator[str]:
    """Start `headwater serve` on a free port and wait until it answers; stop it at the end."""
    with socket.create_server((HOST, 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "headwater", "serve", "--host", HOST, "--port", str(port), "--memory", "1GB"]
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            wait_until_healthy(f"http://{HOST}:{port}/health", process)
            yield f"http://{HOST}:{port}/v1"
        except BaseException:
            log.seek(0)
            console.print(log.read(), markup=False, highlight=False)
            raise
        finally:
            process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerFailed(f"the server ended with exit code {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise ServerFailed(f"the server did not answer {url} within {START_SECONDS} s")


def report(asked: list[Asked]) -> None:
    """Print two lines for each request: question and answer, then the figures. They fit 80 columns and less."""
    for previous, one in zip([None, *asked], asked, strict=False):
        if previous is None or previous.conversation != one.conversation:
            console.print(f"\n[bold]{one.conversation}[/bold]")
        verdict = {None: "", True: " (right)", False: f" [red](wrong: {escape(one.right or '')})[/red]"}[one.is_right]
        answered = Text.from_markup(f"{escape(one.what)} [bold]{escape(one.answer)}[/bold]{verdict}")
        why = f"segments: {one.account['segments']}" if one.account["segments"] else one.account["reason"]
        share = f" ({one.cached_tokens / one.prompt_tokens:.0%}, {why})"
        figures = (
            f"{one.prompt_tokens:,} tokens, {one.cached_tokens:,} cached{share}, first token {one.ttft * 1000:,.0f} ms"
        )
        console.print(Padding(answered, (0, 0, 0, 2)), Padding(Text(figures, "dim"), (0, 0, 0, 4)))
    console.print()
    graded = [one.is_right for one in asked if one.is_right is not None]
    console.print(f"Right answers: {sum(graded)} of {len(graded)}.")
    prompt, cached = sum(a.prompt_tokens for a in asked), sum(a.cached_tokens for a in asked)
    console.print(f"Prefill saved: {cached:,} of {prompt:,} prompt tokens ({cached / prompt:.0%}).")


def main() -> int:
    console.print("Starting `headwater serve` with its embedded model ...")
    try:
        with served() as url, OpenAI(base_url=url, api_key="unused", timeout=60, max_retries=0) as client:
            demo = Demo(client)
            for converse in CONVERSATIONS:
                converse(demo)
    except (ServerFailed, OpenAIError) as error:
        console.print(f"[red]Failed:[/red] {error}")
        return 1
    report(demo.asked)
    for promise in demo.broken:
        console.print(f"[red]Broken:[/red] {promise}")
    if not demo.broken:
        console.print("Every promise was kept.")
    return 1 if demo.broken else 0


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sys.exit(main())
