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
from headwater.cli.demo_documents import QUESTIONS, archive
from headwater.errors import ConfigError
from headwater.load.answer import Answer, Piece
from headwater.load.endpoint import CHAT, Client, ServerError, first_model, refusal_text, streamed, unreachable
from headwater.load.session import Message

EMBEDDED_MODEL = "headwater-tiny"
MAX_COLUMNS = 80
MIN_MEASURED_TOKENS = 64  # of a prefill from which the speed is known
MAX_PRINTED_LEVELS = 2  # levels of /cache that are printed


class Conversation:
    """A chat that sends its whole history unchanged at each turn, so that the server's cache matches it."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        model: str | None = None,
        system: str = "",
        max_tokens: int = 1024,
        ca: Path | None = None,
    ) -> None:
        """Raises ValueError for a malformed URL, OSError for an invalid file `ca`. The first turn connects."""
        self._client = Client(url, api_key, None, ca)
        self.url, self.get, self.close = self._client.url, self._client.get, self._client.close
        self._model, self._max_tokens = model, max_tokens
        self.system = system
        self.messages: list[Message] = []  # without the system prompt
        self._asked: str | None = None  # the last question, even if it got no answer
        self.answer = Answer()  # to the last question
        self.started = 0.0  # time at which that was sent
        self._measured = 0, 0.0  # tokens of the longest prefill so far, and seconds

    def say(self, text: str) -> Generator[Piece, None, None]:
        """Send a message; yields the prompt's progress and the answer's pieces. `close()` keeps the pieces so far.

        Raises ServerError; the conversation is then as it was before the turn.
        """
        self._asked = text
        self.messages.append({"role": "user", "content": text})
        try:
            yield from self._stream()
        except httpx.ConnectError as error:
            self._forget()
            raise unreachable(self.url, error) from error
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

    @property
    def model(self) -> str:
        """Name of the model: the given one, or the first one that the server lists. Raises ServerError."""
        if self._model is None:
            self._model = first_model({"/v1/models": self.get("/v1/models")})
        return self._model

    @property
    def seconds_without_cache(self) -> float | None:
        """Seconds to the last answer's first token without its cached tokens, by the longest prefill of the chat.

        None if that is not known, or no tokens were cached.
        """
        tokens, seconds = self._measured
        cached = self.answer.cached_tokens
        if not cached or self.ttft is None or tokens < MIN_MEASURED_TOKENS:
            return None
        return self.ttft + cached * seconds / tokens

    def _measure(self) -> None:
        computed = (self.answer.prompt_tokens or 0) - (self.answer.cached_tokens or 0)
        if self.ttft is not None and computed > self._measured[0]:
            self._measured = computed, self.ttft

    def _sent(self) -> list[Message]:
        return [{"role": "system", "content": self.system}, *self.messages] if self.system else list(self.messages)

    def _stream(self) -> Iterator[Piece]:
        body = streamed(self.model, {"messages": self._sent(), "max_tokens": self._max_tokens})
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
        self._measure()

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
    ca: Annotated[
        Path | None, Option("--ca", help="Certificates (PEM) to trust for https. [default: SSL_CERT_FILE's, or usual]")
    ] = None,
) -> None:
    """Chat with a running server; shows how many tokens were cached.

    Lines may also be piped in; /help lists the commands of the chat.
    """
    try:
        conversation = Conversation(url, api_key, model, system, max_tokens, ca)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:  # ssl.SSLError, too
        raise ConfigError(f"certificates of --ca {str(ca)!r} or SSL_CERT_FILE cannot be read: {error}") from error
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
        self._file = ""  # text that is sent with the next message

    def run(self) -> None:
        if self._interactive:
            with contextlib.suppress(ImportError):  # makes lines editable, if there is one
                importlib.import_module("readline")
            self._greet()
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

    def _greet(self) -> None:
        """Print the model and what it can be asked. Raises ServerError if no server answers."""
        model = self._conversation.model
        self._note(f"{model} at {self._conversation.url}"[:MAX_COLUMNS])
        if model == EMBEDDED_MODEL:
            self._note("It is small, and answers questions about documents: /demo gives it one.")
        self._note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the chat.")

    def _turn(self, text: str) -> None:
        text, self._file = self._file + text, ""
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
            talk = self._conversation
            self._note(account_line(talk.answer, talk.ttft, talk.seconds_without_cache))

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

    def demo(self, rest: str) -> None:
        """Start a conversation about a document of 2,000 tokens with a question."""
        self._conversation.restart()
        self._conversation.system = archive(88)["content"]
        first, *others = (question for question, _ in QUESTIONS)
        self._note(f"> {first}")
        self._turn(first)
        self._note(f"Ask more, with the document known: {others[0]}")

    def file(self, rest: str) -> None:
        """PATH: send the text of a file with the next message."""
        if not rest:
            raise ServerError("/file needs the path of a file")
        path = Path(rest).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
        except ValueError as error:
            raise ServerError(f"{path} is not a text in UTF-8") from error
        self._file += f"{path.name}:\n\n{text}\n\n"
        self._note(f"{len(text):,} characters are sent with the next message.")

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


NAMES = ("new", "system", "retry", "demo", "file", "cache", "save", "quit", "help")
COMMANDS: dict[str, Callable[[Terminal, str], None]] = {name: getattr(Terminal, name) for name in NAMES}


def account_line(answer: Answer, ttft: float | None, without_cache: float | None = None) -> str:
    """Describe a turn in one line: known tokens of the prompt, seconds to the first token, with those without a cache.

    A server that reports no cached tokens has only its times in it.
    """
    parts = []
    if answer.prompt_tokens is not None and answer.cached_tokens is not None:
        reason = f" ({answer.reason})" if answer.reason not in (None, "full") else ""
        parts.append(f"{answer.cached_tokens:,} of {answer.prompt_tokens:,} tokens known{reason}")
    if ttft is not None:
        instead = "" if without_cache is None else f" instead of about {without_cache:.2f} s"
        parts.append(f"first token after {ttft:.2f} s{instead}")
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
