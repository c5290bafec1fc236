"""`headwater chat`: a chat in the terminal that shows the cached tokens of each turn."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from typer import Option

from headwater.cli.common import ApiKey, ServedModel, commands
from headwater.errors import ConfigError
from headwater.load.answer import Answer, Piece
from headwater.load.endpoint import CHAT, Client, ServerError, first_model, refusal_text, streamed
from headwater.load.session import Message

MAX_PRINTED_LEVELS = 2  # levels of /cache that are printed


class Conversation:
    """A chat that sends its whole history unchanged at each turn, so that the server's cache matches it."""

    def __init__(
        self, url: str, api_key: str | None = None, model: str | None = None, system: str = "", max_tokens: int = 1024
    ) -> None:
        """Raises ValueError for a malformed URL. The first turn connects."""
        self._client = Client(url, api_key, None)
        self.get, self.close = self._client.get, self._client.close
        self._model, self._max_tokens = model, max_tokens
        self.system = system
        self.messages: list[Message] = []  # without the system prompt
        self._asked: str | None = None  # the last question, even if it got no answer
        self.answer = Answer()  # to the last question
        self.started = 0.0  # time at which that was sent

    def say(self, text: str) -> Generator[Piece, None, None]:
        """Send a message; yields the prompt's progress and the answer's pieces. `close()` keeps the pieces so far.

        Raises ServerError; the conversation is then as it was before the turn.
        """
        self._asked = text
        self.messages.append({"role": "user", "content": text})
        try:
            yield from self._stream()
        except httpx.HTTPError as error:
            self._forget()
            raise ServerError(f"{self._client.url}: {error}") from error
        except ServerError:
            self._forget()
            raise
        finally:
            if self.messages and self.messages[-1]["role"] == "user":
                self._keep()

    def retry(self) -> str:
        """Remove the last question and its answer, and return the question. Raises ServerError if there is none."""
        if self._asked is None:
            raise ServerError("nothing was asked yet")
        if self.answer.text:
            del self.messages[-2:]
        return self._asked

    def restart(self) -> None:
        """Remove all messages; the system prompt stays."""
        self.messages.clear()
        self.answer, self._asked = Answer(), None

    def save(self, path: Path) -> None:
        """Write the chat as a recorded session that `headwater bench serve` can send."""
        messages = self._sent()
        calls = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        path.write_text(json.dumps({"session": path.stem, "messages": messages, "calls": calls}) + "\n")

    @property
    def ttft(self) -> float | None:
        """Seconds from the last question to its answer's first token."""
        return None if self.answer.first is None else self.answer.first - self.started

    def _sent(self) -> list[Message]:
        return [{"role": "system", "content": self.system}, *self.messages] if self.system else list(self.messages)

    def _stream(self) -> Iterator[Piece]:
        if self._model is None:
            self._model = first_model({"/v1/models": self.get("/v1/models")})
        body = streamed(self._model, {"messages": self._sent(), "max_tokens": self._max_tokens})
        body["stream_options"]["include_progress"] = True
        answer = self.answer = Answer()
        self.started = time.perf_counter()
        with self._client.http.stream("POST", CHAT, json=body) as response:
            if response.status_code != 200:
                raise ServerError(refusal_text(response.read(), response.status_code))
            for chunk in response.iter_bytes():
                yield from answer.feed(chunk, time.perf_counter())
        if answer.fault is not None:
            raise ServerError(answer.fault)

    def _keep(self) -> None:
        """Keep the pieces of the answer; without any, remove the question."""
        if self.answer.text:
            self.messages.append({"role": "assistant", "content": self.answer.text})
        else:
            self.messages.pop()

    def _forget(self) -> None:
        self.messages.pop()
        self.answer = Answer()


@commands.command()
def chat(
    url: Annotated[str, Option(help="URL of a running server.")] = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    system: Annotated[str, Option(help="System prompt.")] = "",
    max_tokens: Annotated[int, Option(help="Limit of each answer's length.")] = 1024,
    model: ServedModel = None,
) -> None:
    """Chat with a running server; shows how many tokens were cached.

    Lines may also be piped in; /help lists the commands of the chat.
    """
    try:
        conversation = Conversation(url, api_key, model, system, max_tokens)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with contextlib.closing(conversation):
        terminal = Terminal(conversation, Console(highlight=False, soft_wrap=True), sys.stdin.isatty())
        terminal.run()
    if terminal.failed and not sys.stdin.isatty():
        raise typer.Exit(1)


class Terminal:
    """A loop that reads lines and prints answers. `failed`: an error occurred, so the exit code is 1."""

    def __init__(self, conversation: Conversation, console: Console, interactive: bool) -> None:
        self._conversation, self._console, self._interactive = conversation, console, interactive
        self.failed = False
        self._open = True

    def run(self) -> None:
        if self._interactive:
            with contextlib.suppress(ImportError):  # makes lines editable, if there is one
                importlib.import_module("readline")
            self._note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the chat.")
        while self._open and (line := self._line()) is not None:
            if line.startswith("/"):
                self._command(line)
            elif line.strip():
                self._turn(line)

    def _line(self) -> str | None:
        """Read a line; returns None at the end of the input."""
        while True:
            try:
                return input("> " if self._interactive else "")
            except KeyboardInterrupt:
                self._note("\nCtrl-D or /quit ends the chat.")
            except EOFError:
                return None

    def _turn(self, text: str) -> None:
        bar = PrefillBar(self._console)
        with self._errors_shown(), contextlib.closing(self._conversation.say(text)) as pieces, contextlib.closing(bar):
            try:
                for piece in pieces:
                    if piece.kind == "progress":
                        bar.show(*map(int, piece.text.split("/")))
                        continue
                    bar.close()
                    style = None if piece.kind == "text" else "dim"
                    self._console.print(piece.text, end="", style=style, markup=False)
            except KeyboardInterrupt:
                self._note("\n(stopped)")
                return
            self._console.print()
            self._note(account_line(self._conversation.answer, self._conversation.ttft))

    def _command(self, line: str) -> None:
        name, _, rest = line[1:].partition(" ")
        known = COMMANDS.get(name)
        if known is None:
            self.failed = True
            self._note(f"/{name} is not a command: {', '.join('/' + name for name in COMMANDS)}")
            return
        with self._errors_shown():
            known(self, rest.strip())

    @contextlib.contextmanager
    def _errors_shown(self) -> Iterator[None]:
        try:
            yield
        except (ServerError, OSError) as error:
            self.failed = True
            self._console.print(f"[red]{escape(str(error))}[/]")

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)

    # -- commands --------------------------------------------------------------

    def new(self, rest: str) -> None:
        """Start a new conversation; the system prompt stays."""
        self._conversation.restart()
        self._note("A new conversation starts.")

    def system(self, rest: str) -> None:
        """TEXT: use TEXT as the system prompt from the next turn on; without TEXT, show it."""
        if rest:
            self._conversation.system = rest
        self._note(self._conversation.system or "There is no system prompt.")

    def retry(self, rest: str) -> None:
        """Ask the last question again."""
        self._turn(self._conversation.retry())

    def cache(self, rest: str) -> None:
        """Show the contents of the server's cache."""
        for line in outline(self._conversation.get("/cache")):
            self._note(line)

    def save(self, rest: str) -> None:
        """FILE: write the conversation for `headwater bench serve FILE`, which sends it again."""
        if not rest:
            raise ServerError("/save needs the name of a file")
        self._conversation.save(Path(rest).expanduser())
        self._note(f"{len(self._conversation.messages):,} messages were written to {rest}.")

    def quit(self, rest: str) -> None:
        """End the chat."""
        self._open = False

    def help(self, rest: str) -> None:
        """List the commands."""
        for name, command in COMMANDS.items():
            self._note(f"/{name:<8}{command.__doc__}")


class PrefillBar:
    """Bar of a prompt that is being computed, on a terminal until the answer begins."""

    def __init__(self, console: Console) -> None:
        columns = TextColumn("prompt"), BarColumn(), TextColumn("{task.completed:,} of {task.total:,} tokens")
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task: TaskID | None = None

    def show(self, computed: int, tokens: int) -> None:
        """Show how many of the prompt's tokens are computed."""
        if self._task is None:
            self._task = self._progress.add_task("", total=tokens)
            self._progress.start()
        self._progress.update(self._task, completed=computed, total=tokens)

    def close(self) -> None:
        """Remove the bar, if there is one."""
        if self._task is not None:
            self._progress.stop()
            self._progress.remove_task(self._task)
            self._task = None


COMMANDS: dict[str, Callable[[Terminal, str], None]] = {
    name: getattr(Terminal, name) for name in ("new", "system", "retry", "cache", "save", "quit", "help")
}


def account_line(answer: Answer, ttft: float | None) -> str:
    """Describe a turn in one line: prompt tokens, cached tokens and the reason for no more, times."""
    parts = []
    for name, count in (("prompt", answer.prompt_tokens), ("cached", answer.cached_tokens)):
        if count is not None:
            parts.append(f"{name} {count:,} tokens")
    if answer.resumed_at is not None:
        parts.append(f"resumed at {answer.resumed_at:,} ({answer.reason})")
    if ttft is not None:
        parts.append(f"first token after {ttft:.2f} s")
    n = answer.output_tokens
    if n and n > 1 and answer.first is not None and answer.last is not None and answer.last > answer.first:
        parts.append(f"{(n - 1) / (answer.last - answer.first):,.1f} tok/s")
    return f"[{', '.join(parts)}]"


def outline(value: Any, depth: int = 0) -> list[str]:
    """Format a JSON page as indented lines, down to MAX_PRINTED_LEVELS levels."""
    if not isinstance(value, dict):
        return ["  " * depth + json.dumps(value)[:200]]
    lines = []
    for name, item in value.items():
        if isinstance(item, dict | list) and depth < MAX_PRINTED_LEVELS:
            n = f" ({len(item):,})" if isinstance(item, list) else ""
            lines.append(f"{'  ' * depth}{name}:{n}")
            lines += outline(item, depth + 1) if isinstance(item, dict) else []
        elif not isinstance(item, dict | list):
            lines.append(f"{'  ' * depth}{name}: {f'{item:,}' if type(item) is int else item}")
    return lines
