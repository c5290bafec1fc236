"""Every shell example of README and docs runs as it is printed.

A block's info string says how: `sh` in the quick tests, `sh full` in `make test-full`, `sh hits` twice, of which the
second run reports cached tokens, `sh notest=reason` not at all.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.engine.proof.selfcheck import SelfCheck
from headwater.evaluate.items import DEFAULT_TASKS
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.files import embedded
from headwater.models.load import load_model
from headwater.server.app import create_app
from tests.server.routes.test_serving import Server

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "training/README.md", "stress/README.md")
]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
FIRST_READ = ("README.md", "docs/start.md")  # a new user's pages: their blocks run in `make test`
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MAX_SKIPPED_BLOCKS = 10
TIMEOUT_SECONDS = 900  # `make demo` installs all packages
# What a test changes in an example: the address, and the length of what would take minutes.
SHORTER_OPTIONS = (
    (r"--duration \d+", "--duration 1"),
    (r"--warmup \d+", "--warmup 1"),
    (r"\bheadwater eval(?! .*--limit)", "headwater eval --limit 4"),
    (r"\bheadwater (replay|size)(?! .*--limit)", r"headwater \1 --jobs 1 --limit 40"),
    (r"^pip install \"headwater\[serve\]\"", "true"),  # tests/test_wheel.py installs the wheel
    (r"^((?:\S*/)?headwater serve\b)", r"briefly \1"),
)
PRELUDE = """set -euo pipefail
# Start a server on a free port, wait until it listens, and stop it.
briefly() {
  "$@" --port 0 > served.log 2>&1 & local server=$!
  until grep -q 'http://127.0.0.1:' served.log; do kill -0 $server || { cat served.log; return 1; }; sleep 0.1; done
  kill -TERM $server; wait $server
}
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its place, the words after the fence, its text."""

    place: str
    info: str
    text: str

    @property
    def is_shell(self) -> bool:
        return self.info.split()[:1] == ["sh"]

    @property
    def reason(self) -> str | None:
        """Return why it is not run, or None if it is."""
        found = re.search(r"notest=(.*)", self.info)
        return found and found[1].strip("\"'")


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(f"{page.relative_to(ROOT)}:{line}", found[1], found[2])


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUN = [block for block in BLOCKS if block.is_shell and block.reason is None]
QUICK = [block for block in RUN if block.info in ("sh", "sh hits")]
FULL = [block for block in RUN if block not in QUICK]


def ids(block: Block) -> str:
    return block.place


def marked(block: Block) -> ParameterSet:
    """Leave all but the first pages to `make test-full`."""
    return pytest.param(block, marks=[] if block.place.startswith(FIRST_READ) else pytest.mark.full)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Host and port of a server with the embedded model."""
    prepare_process(1)
    numerics.use(Numerics())
    config = ServeConfig(memory=300_000_000)
    engine = Engine.over(load_model(embedded(), "float32"), SelfCheck(True, None, "compiled"), config)
    engine.start()
    with socket.create_server(("127.0.0.1", 0)) as sock, Server(create_app(engine, config), sock):
        yield f"127.0.0.1:{sock.getsockname()[1]}"
    engine.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A clone with an environment, and the files that examples name."""
    bin = tmp_path / ".venv" / "bin"
    bin.mkdir(parents=True)
    for name, options in (("python", ""), ("headwater", "-m headwater")):
        (bin / name).write_text(f'#!/bin/sh\nexec {sys.executable} {options} "$@"\n')
        (bin / name).chmod(0o755)
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("build", "dist"):
            (tmp_path / path.name).symlink_to(path)
    write_inputs(tmp_path)
    return tmp_path


def write_inputs(folder: Path) -> None:
    """Write recorded traffic, questions and measurements, as small as their readers take."""
    sessions, tokens, questions, points = [], [], [], []
    passages = [{"title": f"Title {i}", "text": f"Text {i} of some length. " * 30} for i in range(8)]
    for i in range(8):
        messages = [{"role": role, "content": f"{role} {i} said " * 60} for role in ("user", "assistant") * 2]
        sessions.append({"messages": messages, "calls": [1, 3], "t0": i, "t": [0.0, 0.5]})
        tokens.append({"t": i, "session": str(i), "input": list(range(300)), "output": [i]})
        questions.append({"question": f"Question {i}?", "answers": ["a"], "passages": passages[i:] + passages[:i]})
        points.append({"prompt_tokens": 500 + 900 * i, "cached_tokens": 200 * i, "ttft_ms": 30.0 + 45 * i})
    for name, lines in (
        ("sessions.jsonl", sessions),
        ("day.trace.zst", tokens),
        ("data/mini_swe_agent/sessions.jsonl", sessions),
        ("data/rag_musique/train_100.jsonl", questions),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "points.json").write_text(json.dumps(points))
    shutil.copy(DEFAULT_TASKS, folder / "mine.jsonl")


def shell(block: Block, folder: Path, address: str) -> str:
    """Run a block as it is printed but for SHORTER_OPTIONS, and return what it wrote to standard output."""
    text = re.sub(r"(localhost|127\.0\.0\.1):8000", address, block.text)
    text = re.sub(r"\bheadwater (bench serve|chat)\b", rf"headwater \1 --url http://{address}", text)
    for long, short in SHORTER_OPTIONS:
        text = re.sub(long, short, text, flags=re.MULTILINE)
    for python in re.findall(r"^```python\n(.*?)^```$", (ROOT / block.place.split(":")[0]).read_text(), re.M | re.S):
        if named := re.match(r'"""(\w+\.py):', python):
            (folder / named[1]).write_text(python)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
        "MODEL": str(embedded()),
        "DATA": str(folder / "data"),
        "PYTHONPATH": str(ROOT / "src"),
    }
    environment["PATH"] = f"{folder / '.venv' / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", PRELUDE + text], cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("block", [marked(block) for block in QUICK], ids=ids)
def test_shell_block_runs(block: Block, folder: Path, address: str) -> None:
    first = shell(block, folder, address)
    if block.info == "sh hits":
        again = shell(block, folder, address)
        assert account(again)["cached_tokens"] > account(first)["cached_tokens"] == 0


def accounts() -> Iterator[tuple[Block, str]]:
    """Yield each account that README and tutorial show, with the example before it."""
    for page in (ROOT / "README.md", ROOT / "docs" / "start.md"):
        example = None
        for block in blocks_of(page):
            if block.is_shell:
                example = block
            elif example and block.text.startswith('"headwater": '):
                yield example, block.text.removeprefix('"headwater": ')


@pytest.mark.parametrize(("example", "shown"), accounts(), ids=lambda one: one.place if isinstance(one, Block) else "")
def test_shown_account_is_that_of_its_example(example: Block, shown: str, folder: Path, address: str) -> None:
    salt = f'"cache_salt": "{example.place}", "messages"'
    own = Block(example.place, example.info, example.text.replace('"messages"', salt))
    printed = shell(own, folder, address)
    if example.info == "sh hits":
        assert account(printed)["cached_tokens"] == 0
        printed = shell(own, folder, address)
    found = account(printed)
    assert {key: found[key] for key in json.loads(shown)} == json.loads(shown)


def account(printed: str) -> dict[str, object]:
    """Return the account in the reply that an example prints last."""
    return json.loads(printed.splitlines()[-1])["headwater"]


@pytest.mark.full
@pytest.mark.parametrize("block", FULL, ids=ids)
def test_long_shell_block_runs(block: Block, folder: Path, address: str) -> None:
    if re.search(r"^make ", block.text, re.MULTILINE):
        folder = folder / "clone"
        names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    shell(block, folder, address)


def test_block_has_language_and_shell_block_known_tag() -> None:
    assert len(QUICK) >= 3
    assert [block.place for block in BLOCKS if not block.info] == []
    tags = {block.place: block.info for block in BLOCKS if block.is_shell and block.reason is None}
    assert {place: info for place, info in tags.items() if info not in ("sh", "sh full", "sh hits")} == {}
    assert [block.place for block in BLOCKS if block.info.split()[0] in ("bash", "shell", "console")] == []


def test_at_most_ten_shell_blocks_are_skipped_each_with_a_reason() -> None:
    reasons = {block.place: block.reason for block in BLOCKS if block.reason is not None}
    assert len(reasons) <= MAX_SKIPPED_BLOCKS
    assert all(len(reason) > 10 for reason in reasons.values())


def test_commands_stand_only_in_shell_blocks() -> None:
    """Commands stand in shell blocks; a synopsis, which has optional parts in brackets, is text."""
    command = re.compile(r"^(?:\$ )?(?:make|pip|curl|docker|(?:\.venv/bin/)?(?:headwater|python)) ", re.MULTILINE)
    others = [block for block in BLOCKS if not block.is_shell and not re.search(r"\[[A-Z-]", block.text)]
    assert [block.place for block in others if command.search(block.text)] == []
