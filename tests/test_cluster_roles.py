"""A cluster with roles and two routers that loses a worker at each stage of a hand-over, under requests.

Longer checks, `make test-cluster`.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from tests.test_cluster_serve import PATIENCE, Running, up
from tests.test_cluster_serve import until as until_within

pytestmark = pytest.mark.full

WORKERS = {"prefill": 1, "decode": 2}
TOKENS = 60
LONG = 1000  # tokens of answers that are decoded meanwhile
BESIDE, MOST = 2, 16  # of these at each worker that decodes, and in all; without one, it prefills prompts
PROMPT = "the tide comes in " * 1500  # 7,501 tokens: a prefill of seconds
REPEATS = 2
APART: list[bool] = []  # of prompts whose worker that prefills lived until the first token: it was prefilled there


def until(holds: Callable[[], object]) -> None:
    """Wait until something holds; a router that has just lost a worker may not answer at once."""

    def held() -> object:
        try:
            return holds()
        except httpx.TransportError:
            return False

    until_within(held)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    roles = [word for role, number in WORKERS.items() for word in (f"--{role}", str(number))]
    with up(tmp_path_factory.mktemp("up"), "--routers", "2", *roles, workers=sum(WORKERS.values())) as one:
        until(lambda: whole(one))
        yield one


def whole(one: Running) -> bool:
    ups = [worker["role"] for worker in one.workers().values() if worker["state"] == "up"]
    return all(ups.count(role) == number for role, number in WORKERS.items())


def of_role(one: Running, role: str) -> list[dict]:
    return [worker for worker in one.workers().values() if worker["role"] == role and worker["state"] == "up"]


class Asked:
    """A streamed answer to the long prompt, which nothing has cached, and how far it is."""

    def __init__(self, running: Running, salt: str) -> None:
        self.tokens = 0
        self.said: list[tuple[str, float]] = []
        self.account: dict = {}
        self.pause = 0.0
        self._running, self._salt, self._last = running, salt, time.monotonic()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        more = {"prompt": PROMPT, "cache_salt": self._salt}
        self.said = self._running.story(TOKENS, self._reached, accounts=self.account.update, **more)

    def _reached(self, tokens: int) -> None:
        now = time.monotonic()
        self.tokens, self.pause, self._last = tokens, max(self.pause, now - self._last if tokens > 1 else 0.0), now

    def wait(self) -> list[tuple[str, float]]:
        self._thread.join(PATIENCE)
        return self.said


def decoding(running: Running, before: dict[str, int]) -> dict:
    """Return the worker that decodes one request more than before, or the one with most."""
    workers = of_role(running, "decode")
    return max(workers, key=lambda one: one["running"] - before.get(one["name"], 0))


def beside(running: Running, clients: ThreadPoolExecutor) -> list[Future[list[tuple[str, float]]]]:
    """Ask for answers until each worker that decodes has some: which one gets them depends on measured speeds."""
    asked = []
    while min((one["running"] for one in of_role(running, "decode")), default=0) < BESIDE and len(asked) < MOST:
        asked.append(clients.submit(running.story, LONG))
        time.sleep(0.2)
    return asked


def prefills(running: Running) -> bool:
    return any(one["running"] for one in of_role(running, "prefill"))


STAGES = {
    "the prompt is prefilled": lambda asked, running: prefills(running) or asked.tokens,
    "the first token was sent": lambda asked, running: asked.tokens >= 1,
    "the second token was sent": lambda asked, running: asked.tokens >= 2,
    "half of the answer was sent": lambda asked, running: asked.tokens >= TOKENS // 2,
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("role", WORKERS)
def test_a_worker_killed_at_any_stage_changes_no_answer(running: Running, role: str, stage: str) -> None:
    undisturbed = running.story(LONG), running.story(TOKENS, prompt=PROMPT, cache_salt="undisturbed")
    for repeat in range(REPEATS):
        until(lambda: whole(running))
        with ThreadPoolExecutor(MOST) as clients:
            others = beside(running, clients)
            before = {one["name"]: one["running"] for one in of_role(running, "decode")}
            asked = Asked(running, f"{role} {stage} {repeat}")
            until(lambda asked=asked: STAGES[stage](asked, running))
            victim = decoding(running, before) if role == "decode" else of_role(running, "prefill")[0]
            had = asked.tokens
            os.kill(victim["process"], signal.SIGKILL)
            said = asked.wait()
            assert said == undisturbed[1], f"{len(said)} of {TOKENS} tokens, killed after {had}"
            assert all(one.result(PATIENCE) == undisturbed[0] for one in others)
        apart = asked.account.get("prefilled_by") is not None
        if role == "decode" or had:
            APART.append(apart)
        print(f"\n{role} worker killed after {had} tokens ({stage}), {apart=}: longest pause {asked.pause:.1f} s")
    until(lambda: whole(running))


def test_most_prompts_were_prefilled_apart() -> None:
    print(f"\n{sum(APART)} of {len(APART)} prompts were prefilled apart")
    assert sum(APART) >= 0.75 * len(APART) > 0


def test_both_routers_took_part(running: Running) -> None:
    seen = {
        httpx.get(f"{running.url.removesuffix('/v1')}/health", timeout=PATIENCE).json()["router"] for _ in range(64)
    }
    assert len(seen) == 2
    shown = running.cluster("status").stdout
    print(shown)
    assert "failed" not in shown
    assert "diverged" not in shown
    assert "handed over" in shown
