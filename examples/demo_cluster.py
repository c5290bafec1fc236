"""Demo: two workers on Ray behind a router hold conversations, and one is killed in the middle of an answer.

It prints what each turn found cached, whether the answer that lost its worker is the undisturbed one, and what became
of all requests. The exit code is 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openai import OpenAI
from rich.console import Console

START_SECONDS = 120
NOTE = "The harbour office keeps a list of all ships. A ship that stays for more than three nights pays for its berth. "
SESSIONS = ("Who keeps the list?", "Which ships pay?", "For how many nights is a berth free?")
TURNS = 3
STORY = "Tell a long story about the sea, the harbour and its people."
TOKENS = 600  # of the story
KILLED_AFTER = 60  # of them

console = Console()


@contextmanager
def cluster(workers: int) -> Iterator[tuple[OpenAI, str]]:
    """Start a cluster on a free port; yield a client and the server's address, and end it as Ctrl-C does."""
    command = [sys.executable, "-m", "headwater", "cluster", "up", "--workers", str(workers), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--memory", "1GB"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said, end = "", time.monotonic() + START_SECONDS
        while not (found := re.search(r"serves \S+ on (http://\S+)", said)):
            assert process.stdout is not None
            line = process.stdout.readline()
            said += line
            if not line or time.monotonic() > end:
                raise SystemExit(f"the cluster did not start:\n{said}")
        url = found[1]
        with OpenAI(base_url=url, api_key="none", timeout=120) as client:
            yield client, url.removesuffix("/v1")
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def state(base: str) -> dict[str, Any]:
    """Return the router's health: its workers, and what became of requests."""
    with urllib.request.urlopen(f"{base}/health", timeout=10) as response:
        found: dict[str, Any] = json.load(response)
    return found


def conversations(client: OpenAI) -> bool:
    """Hold the conversations; return whether every turn but a session's first found its history cached."""
    console.print(f"\n{len(SESSIONS)} conversations, {TURNS} turns each: cached tokens of each prompt")
    kept = True
    for first in SESSIONS:
        messages: list[Any] = [{"role": "user", "content": NOTE * 12 + first}]
        found = []
        for turn in range(TURNS):
            answer = client.chat.completions.create(model="any", messages=messages, max_tokens=32, temperature=0)
            assert answer.usage is not None
            details, prompt = answer.usage.prompt_tokens_details, answer.usage.prompt_tokens
            cached = (details and details.cached_tokens) or 0
            found.append(f"{cached:,} of {prompt:,}")
            kept = kept and (turn == 0 or cached > 0)
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": "And what else does the note say?"},
            ]
            time.sleep(0.3)  # the answer is cached meanwhile
        console.print(f"  {first:<40} {', '.join(found)}")
    return kept


def story(client: OpenAI, base: str, kill: bool) -> str:
    """Return the story, in the middle of which the worker that tells it is killed if so wanted."""
    stream = client.completions.create(
        model="any",
        prompt=STORY,
        max_tokens=TOKENS,
        temperature=0.9,
        seed=7,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    text = ""
    for count, chunk in enumerate(stream, 1):
        text += chunk.choices[0].text if chunk.choices else ""
        if kill and count == KILLED_AFTER:
            (worker,) = (one for one in state(base)["workers"] if one["requests"])
            os.kill(worker["process"], signal.SIGKILL)
            console.print(f"  killed {worker['name']}, process {worker['process']}, after {count} tokens")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    begun = time.monotonic()
    with cluster(given.workers) as (client, base):
        console.print(f"{given.workers} workers of headwater-tiny are up after {time.monotonic() - begun:.0f} s")
        kept = conversations(client)
        console.print("\nA story, told twice")
        lost, whole = story(client, base, kill=True), story(client, base, kill=False)
        equal = lost == whole and len(whole) > 0
        console.print(f"  {len(lost):,} and {len(whole):,} characters: {'equal' if equal else 'DIFFERENT'}")
        requests = state(base)["requests"]
        console.print("\nRequests: " + ", ".join(f"{n} {what.replace('_', ' ')}" for what, n in requests.items() if n))
    broken = [
        *(["a turn found nothing cached"] if not kept else []),
        *(["the story changed when its worker was killed"] if not equal else []),
        *(["no answer was resumed"] if not requests.get("resumed") else []),
    ]
    console.print("Every promise was kept." if not broken else f"BROKEN: {', '.join(broken)}")
    console.print(f"It took {time.monotonic() - begun:.0f} s in all (goal: at most 150).")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
