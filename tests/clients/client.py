"""A real client: a script that drives it, the versions in the script's head, and an environment of its own.

The head is inline script metadata (PEP 723): `dependencies` are pinned and the first one is the client, and
`[tool.headwater] shows` names the checks of `checks.py`. The script reads BASE_URL, MODEL, TASK (the path of
`task.json`), TOKENIZER (a folder) and WORK (an empty folder) from its environment, and prints one JSON object on its
last line, with a value for each check.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.models.files import embedded

HERE = Path(__file__).parent
TASK = HERE / "task.json"
ENVIRONMENTS = HERE.parents[1] / ".clients"
HEAD = re.compile(r"^(#|//) /// script\n(.*?)^\1 ///$", re.M | re.S)
INSTALL_SECONDS, RUN_SECONDS = 1800, 300
QUIET = {  # no client asks the network for anything at run time
    "ANONYMIZED_TELEMETRY": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OTEL_SDK_DISABLED": "true",
    "TRANSFORMERS_OFFLINE": "1",
}


@dataclass(frozen=True)
class Client:
    """A client's script and its head. `dependencies` are pinned as the package manager writes them."""

    script: Path
    dependencies: tuple[str, ...]
    shows: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.script.stem

    @property
    def folder(self) -> Path:
        return ENVIRONMENTS / self.name

    @property
    def version(self) -> str:
        """Pinned version of the client itself."""
        return re.split(r"==|(?<=.)@", self.dependencies[0])[-1]

    def installed(self) -> list[str]:
        """Install the pinned versions, unless they are, and return the command that runs the script.

        Raises CalledProcessError if the package manager fails.
        """
        install, command = KINDS[self.script.suffix]
        stamp = self.folder / "installed.json"
        wanted = json.dumps([sys.version, *self.dependencies])
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(self.folder, ignore_errors=True)
            install(self)
            stamp.write_text(wanted)
        return command(self)

    def run(self, command: list[str], url: str, work: Path, proxy: str) -> dict[str, Any]:
        """Run the script against the server at `url` and return what it printed. Raises AssertionError if it fails."""
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), proxy)
        environment = {
            **{key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ},
            **QUIET,
            **proxies,
            **{"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"},
            **{"HOME": str(work), "WORK": str(work), "TASK": str(TASK), "BASE_URL": url, "MODEL": embedded().name},
            "TOKENIZER": str(embedded()),
        }
        ran = subprocess.run(
            command,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
        )
        assert ran.returncode == 0, (
            f"{self.name} ended with {ran.returncode}\n{ran.stdout[-2000:]}\n{ran.stderr[-6000:]}"
        )
        return json.loads(ran.stdout.strip().splitlines()[-1])


def read(script: Path) -> Client:
    """Return the client of a script. Raises AssertionError if the script has no head."""
    found = HEAD.search(script.read_text())
    assert found, f"{script.name} has no head: it begins with `# /// script`, see {Path(__file__).name}"
    head = tomllib.loads("".join(line.removeprefix(found[1]).strip() + "\n" for line in found[2].splitlines()))
    return Client(script, tuple(head["dependencies"]), tuple(head["tool"]["headwater"]["shows"]))


def clients() -> list[Client]:
    """Return all clients, by name."""
    return [read(script) for script in sorted((HERE / "scripts").iterdir()) if script.suffix in KINDS]


def with_python(client: Client, python: Path | str) -> list[str]:
    """Return the command of a script. Its folder, where files have clients' names, is not an import path (-P)."""
    return [str(python), "-P", str(client.script)]


def _install_python(client: Client) -> None:
    subprocess.run([sys.executable, "-m", "venv", client.folder], check=True)
    pip = [client.folder / "bin" / "pip", "install", "--quiet", *client.dependencies]
    subprocess.run(pip, check=True, timeout=INSTALL_SECONDS)


def _install_node(client: Client) -> None:
    client.folder.mkdir(parents=True)
    (client.folder / "package.json").write_text('{"private": true}')
    npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", *client.dependencies]
    subprocess.run(npm, cwd=client.folder, check=True, timeout=INSTALL_SECONDS)


def _with_node(client: Client) -> list[str]:
    """Return the command that runs a script. Imports are looked up next to the script, so a copy runs."""
    return ["node", str(shutil.copy(client.script, client.folder))]


Install, Command = Callable[[Client], None], Callable[[Client], list[str]]
KINDS: dict[str, tuple[Install, Command]] = {
    ".py": (_install_python, lambda client: with_python(client, client.folder / "bin" / "python")),
    ".mjs": (_install_node, _with_node),
}
