"""A cluster on a Ray cluster whose head ends, and is started again from Redis, or is not.

Longer checks, `make test-cluster`: the head is a host of its own, as a network namespace; the process of `cluster up`
is on this one, which has a raylet without processors.
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from headwater.cluster.ray_cluster import RECONNECT_VARIABLE
from tests.redis_server import redis_server
from tests.test_cluster_faults import BRIDGE, HEAD, LOCK, NETWORK, PORT, RAY, Host, command_of, ip, network
from tests.test_cluster_serve import PATIENCE, STORY, Running, until, up

pytestmark = pytest.mark.full

TOKENS, AT_ONCE = 300, 3
AWAY = f"{NETWORK}.13"  # address of Ray's head
NODE = ("--disable-usage-stats", "--object-store-memory=100000000", "--block")
# Ray looks for raylets in the table of processes, where it finds the head's first: this names the one of this host
HEADWATER = f"""
import ray
from functools import partial

ray.init = partial(ray.init, _node_ip_address="{HEAD}")
from headwater.cli import app

app()
"""
KILLED = """
import subprocess, time
from tests.test_cluster_faults import network

with network({}, 1) as (host,):
    print(subprocess.Popen(["ip", "netns", "exec", host.name, "sleep", "600"]).pid, flush=True)
    time.sleep(600)
"""


@dataclass
class Hosts:
    """A cluster with workers on two hosts, and Ray's head on a third one."""

    head: Host
    folder: Path  # of Ray's files
    running: Running = field(init=False)

    def start_head(self) -> None:
        """Start Ray's head, or start it again."""
        # all hosts are on one machine: Ray would find raylets of the others, and take the head for one that runs
        (self.folder / "ray" / "ray_current_cluster").unlink(missing_ok=True)
        self.head.start("--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false")


@contextmanager
def hosts(folder: Path, *, with_redis: bool) -> Iterator[Hosts]:
    """Yield a cluster; Ray's head keeps its tables in Redis, or only in its memory."""
    secrets = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 64}
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        files = stack.enter_context(TemporaryDirectory(prefix="hw", ignore_cleanup_errors=True))  # of a short name
        # with Redis the head comes back, however long a busy machine takes to start it
        patience = {RECONNECT_VARIABLE: str(2 * PATIENCE)} if with_redis else {}
        for name, value in {**secrets, **patience, "RAY_TMPDIR": files}.items():
            patch.setenv(name, value)
        patch.setattr("tests.test_cluster_serve.HEADWATER", (sys.executable, "-c", HEADWATER))
        *workers, head = stack.enter_context(network({**os.environ}, 3))
        if with_redis:
            redis = stack.enter_context(redis_server(folder, "--bind", "127.0.0.1", HEAD, "--protected-mode", "no"))
            kept = {"RAY_REDIS_ADDRESS": f"{HEAD}:{redis.port}", "RAY_external_storage_namespace": "headwater"}
            head.environment = {**os.environ, **kept}
        found = Hosts(head, Path(files))
        found.start_head()
        stack.enter_context(raylet_here())
        for host in workers:
            host.start(f"--address={AWAY}:{PORT}", "--num-cpus=1")
        found.running = stack.enter_context(up(folder, "--address", f"{AWAY}:{PORT}", hosts=2))
        yield found


@contextmanager
def raylet_here() -> Iterator[None]:
    """Run a raylet on this host, without processors for workers."""
    command = [*RAY, f"--address={AWAY}:{PORT}", f"--node-ip-address={HEAD}", "--num-cpus=0", *NODE]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(command, **pipes) as raylet:
        try:
            assert any("Ray runtime started" in line for line in raylet.stdout)
            threading.Thread(target=raylet.stdout.read, daemon=True).start()
            yield
        finally:
            with suppress(ProcessLookupError):
                os.killpg(raylet.pid, signal.SIGKILL)


@dataclass
class Clients:
    """Clients who ask without a pause, and what became of each request."""

    running: Running
    whole: list[tuple[str, float]]
    outcomes: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        while not self.over.is_set():
            try:
                said = self.running.story(TOKENS)
                outcome = "whole" if said == self.whole else "broken" if said else "refused"
            except httpx.HTTPError as error:
                outcome = type(error).__name__
            self.outcomes.append(outcome)


@contextmanager
def asking(running: Running) -> Iterator[Clients]:
    one = Clients(running, running.story(TOKENS))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = [pool.submit(one.ask) for _ in range(AT_ONCE)]
        try:
            until(lambda: len(one.outcomes) >= AT_ONCE)
            yield one
        finally:
            one.over.set()
        for each in asked:
            each.result(PATIENCE)


def test_hosts_that_a_killed_run_left_are_removed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bridge that was left would take the packets of the next one, which has the same address."""
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as run:
        said = run.stdout.readline()
        run.kill()
    if not said:
        pytest.skip("no network namespaces can be made here")
    monkeypatch.setattr(pytest, "skip", pytest.fail)  # they can
    assert command_of(int(said))
    with network({}, 1) as (host,), socket.create_server((HEAD, 0)) as server:
        assert not command_of(int(said))
        ip("netns", "exec", host.name, "bash", "-c", f"< /dev/tcp/{HEAD}/{server.getsockname()[1]}")
    with pytest.raises(subprocess.CalledProcessError):
        ip("link", "show", BRIDGE)


def test_one_process_at_a_time_has_hosts() -> None:
    with network({}, 1), LOCK.open("w") as second, pytest.raises(BlockingIOError):
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("seconds", [5, 30])
def test_requests_continue_after_rays_head_restarts_from_redis(tmp_path: Path, seconds: float) -> None:
    """After the absence commands arrive, and a worker that is killed is replaced."""
    with hosts(tmp_path, with_redis=True) as cluster:
        running = cluster.running
        with asking(running) as clients:
            began = time.monotonic()
            cluster.head.kill()
            assert "no Ray cluster at" in running.cluster("status").stderr
            time.sleep(max(0.0, began + seconds - time.monotonic()))
            cluster.start_head()
            print(f"\nhead away for {time.monotonic() - began:.0f} s")
            until(lambda: running.cluster("status").returncode == 0)
            print(f"commands arrive after {time.monotonic() - began:.0f} s")
            old = running.ups()[0]
            os.kill(running.workers()[old]["process"], signal.SIGKILL)
            until(lambda: len(running.ups()) == 2 and old not in running.ups())
            print(f"a new worker serves after {time.monotonic() - began:.0f} s")
        print(f"{len(clients.outcomes)} answers, {running.counts()}")
        assert set(clients.outcomes) == {"whole"}
        assert running.cluster("down").returncode == 0
        assert running.process.wait(PATIENCE) == 0


def test_loss_of_redis_ends_requests_and_refuses_new_ones(tmp_path: Path) -> None:
    """Answers continue, then connections and requests are refused, and the process ends with an error that says why."""
    with hosts(tmp_path, with_redis=False) as cluster, asking(cluster.running) as clients:
        running = cluster.running
        cluster.head.kill()
        began, seen = time.monotonic(), list[tuple[float, object]]()
        while running.process.poll() is None and time.monotonic() - began < PATIENCE:
            with suppress(httpx.HTTPError):
                answer = httpx.post(f"{running.url}/completions", json={**STORY, "max_tokens": 1}, timeout=PATIENCE)
                seen.append((time.monotonic() - began, answer.status_code))
            time.sleep(0.2)
        clients.over.set()
    outcomes = set(clients.outcomes)
    ended = {status: max(at for at, one in seen if one == status) for status in {one for _, one in seen}}
    print(
        f"\nlast answers of each status: {ended}, the process ended after {time.monotonic() - began:.0f} s, {outcomes}"
    )
    assert running.process.returncode == 2
    assert "Ray's head has ended, and with it the cluster" in "".join(running.said)
    assert set(ended) == {200, 503}
    assert "broken" not in outcomes
