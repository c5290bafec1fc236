"""Serves the embedded default and holds five conversations with it, as clients do; prints what the cache did for each.

The answers are noise, the weights being random; the caching is real. Exits with 1 if a promise was broken.
"""

from __future__ import annotations

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

from openai import OpenAI, OpenAIError
from rich.console import Console
from rich.table import Table

HOST = "127.0.0.1"
START_SECONDS = 60
ANSWER_TOKENS = 24
PAGE = 64
SLACK = 2 * PAGE  # a boundary is floored to its page, and the generation prompt stands after it

console = Console()


class ServerFailed(Exception):
    """`headwater serve` ended, or never answered."""


@dataclass(frozen=True)
class Asked:
    """One request, as its client saw it."""

    conversation: str
    what: str
    answer: str
    ttft: float  # seconds
    account: dict[str, Any]

    @property
    def prompt_tokens(self) -> int:
        return self.account["prompt_tokens"]

    @property
    def cached_tokens(self) -> int:
        return self.account["cached_tokens"]


@dataclass
class Demo:
    """Asks, remembers, and holds the server to its promises."""

    client: OpenAI
    asked: list[Asked] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def ask(
        self, conversation: str, what: str, messages: list[dict[str, Any]], at_least: int = 0, **more: Any
    ) -> Asked:
        """Stream one greedy answer. `at_least`: cached tokens promised."""
        thinking = more.pop("thinking", False)
        start, ttft, pieces, account = time.perf_counter(), None, [], None
        stream = self.client.chat.completions.create(
            model="default",
            messages=messages,
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"chat_template_kwargs": {"enable_thinking": thinking}, "ignore_eos": True},
            **more,
        )
        for chunk in stream:
            if chunk.choices and ttft is None:
                ttft = time.perf_counter() - start
            pieces += [choice.delta.content or "" for choice in chunk.choices]
            account = (chunk.model_extra or {}).get("headwater", account)
        asked = Asked(conversation, what, "".join(pieces), ttft or 0.0, account or {})
        self.asked.append(asked)
        self.expect(
            asked.cached_tokens >= at_least,
            f"{conversation}, {what}: {asked.cached_tokens:,} tokens cached, at least {at_least:,} promised",
        )
        return asked

    def expect(self, kept: bool, promise: str) -> None:
        if not kept:
            self.broken.append(promise)


def handbook(name: str, rules: int) -> str:
    """A long system prompt that begins unlike any other's: about 40 tokens a rule."""
    topics = ["orders", "refunds", "returns", "invoices", "passwords", "delivery", "privacy", "complaints"]
    lines = [f"You are {name}. Follow the handbook to the letter."]
    for i in range(rules):
        topic, next_topic = topics[i % len(topics)], topics[(i + 3) % len(topics)]
        lines.append(
            f"Rule {i + 1}: when {name} is asked about {topic}, look at {next_topic} first, and answer shortly."
        )
    return "\n".join(lines)


def resend(demo: Demo) -> None:
    messages = [message("system", handbook("the night porter", 40)), message("user", "Where may I leave my keys?")]
    first = demo.ask("resend", "a question", messages)
    again = demo.ask("resend", "the same again", messages, at_least=(first.prompt_tokens - 1) // PAGE * PAGE)
    demo.expect(first.answer == again.answer, "resend: a hit changed the answer")


def growing_chat(demo: Demo) -> None:
    questions = ["How do I open an account?", "And for my firm?", "What does it cost?", "Thank you. Who are you?"]
    messages = [message("system", handbook("a bank's clerk", 35))]
    known = 0
    for turn, question in enumerate(questions):
        messages.append(message("user", question))
        asked = demo.ask("growing chat", f"turn {turn + 1}", messages, at_least=known)
        messages.append(message("assistant", asked.answer))
        known = asked.prompt_tokens - SLACK


def shared_system_prompt(demo: Demo) -> None:
    system = message("system", handbook("the help desk", 45))
    first = demo.ask("shared system prompt", "Ann's first", [system, message("user", "My screen is blue.")])
    question = message("user", "I forgot my password, can you help?")
    demo.ask("shared system prompt", "Bob's first", [system, question], at_least=first.prompt_tokens - SLACK)


def stripped_reasoning(demo: Demo) -> None:
    """What the model thought is sent back with its answer, as clients do, and the template strips it."""
    messages = [message("system", handbook("a careful mathematician", 35))]
    known = 0
    for turn, question in enumerate(["Is 91 a prime?", "Is 97 one?", "What of their product?"]):
        messages.append(message("user", question))
        asked = demo.ask("stripped reasoning", f"turn {turn + 1}", messages, at_least=known, thinking=True)
        messages.append(message("assistant", f"{asked.answer}\n</think>\n\nSo it seems."))
        known = asked.prompt_tokens - SLACK


def agent(demo: Demo) -> None:
    tools = [tool("read_file", "path"), tool("run_tests", "pattern"), tool("edit_file", "patch")]
    calls = [
        ("read_file", '{"path": "tree.py"}'),
        ("run_tests", '{"pattern": "tree"}'),
        ("edit_file", '{"patch": "+1"}'),
    ]
    task = message("user", "The tree's tests fail on an empty input. Find out why, and mend it.")
    messages = [message("system", handbook("a programmer", 25)), task]
    asked = demo.ask("agent with tools", "the task", messages, tools=tools)
    for step, (name, arguments) in enumerate(calls):
        call = {"id": f"call_{step}", "type": "function", "function": {"name": name, "arguments": arguments}}
        result = "\n".join(f"{name} line {i}: node {i * 7 % 31} has {i % 5} children" for i in range(25))
        messages.append({**message("assistant", asked.answer), "tool_calls": [call]})
        messages.append({**message("tool", result), "tool_call_id": call["id"]})
        known = asked.prompt_tokens - SLACK
        asked = demo.ask("agent with tools", f"after {name}", messages, at_least=known, tools=tools)


CONVERSATIONS = (resend, growing_chat, shared_system_prompt, stripped_reasoning, agent)


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def tool(name: str, argument: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    about = f"Use {name} whenever its {argument} is known."
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


@contextmanager
def served() -> Iterator[str]:
    """`headwater serve` on a free port, until it answers; stopped at the end, whatever happened."""
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
    table = Table(title="What the cache did", title_justify="left")
    for name in ("conversation", "request"):
        table.add_column(name, no_wrap=True)
    for name in ("prompt tokens", "cached", "TTFT"):
        table.add_column(name, justify="right")
    table.add_column("reason", no_wrap=True)
    for previous, one in zip([None, *asked], asked, strict=False):
        same = previous is not None and previous.conversation == one.conversation
        if previous is not None and not same:
            table.add_section()
        table.add_row(
            "" if same else one.conversation,
            one.what,
            f"{one.prompt_tokens:,}",
            f"{one.cached_tokens:,}",
            f"{one.ttft * 1000:,.0f} ms",
            one.account["reason"],
        )
    console.print(table)
    prompt, cached = sum(a.prompt_tokens for a in asked), sum(a.cached_tokens for a in asked)
    console.print(f"Prefill saved: {cached:,} of {prompt:,} prompt tokens ({cached / prompt:.0%}).")


def main() -> int:
    console.print("Starting `headwater serve` with its embedded model (answers are noise, caching is real) ...")
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
    sys.exit(main())
