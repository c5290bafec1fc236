"""A cluster whose workers are on hosts of their own, as network namespaces: hosts that die, links that are cut.

Longer checks, `make test-cluster`: two raylets and the head, each behind a link that can be cut.
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import gettempdir

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from headwater.cluster.router import HEARTBEAT_TIMEOUT_SECONDS
from tests.test_cluster_serve import PATIENCE, Running, until, up

pytestmark = pytest.mark.full

HEAD, PORT, NETWORK = "10.77.0.1", 6399, "10.77.0"
BRIDGE, MOST_HOSTS = "hwb", 3
LOCK = Path(gettempdir()) / "headwater-hosts.lock"
TOKENS, AT_ONCE = 300, 4
EACH = 4  # requests of a client
RAY = sys.executable, "-m", "ray.scripts.scripts", "start"


def ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True, text=True, timeout=PATIENCE)


def delete(kind: str, name: str) -> None:
    """Remove a link or a namespace, if it is there."""
    with suppress(subprocess.CalledProcessError):
        ip(kind, "delete", name)


@dataclass
class Host:
    """A network namespace with a raylet, joined to the head's bridge by a link."""

    number: int
    environment: dict[str, str]
    raylet: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.name = f"hwn{self.number}"
        self.address = f"{NETWORK}.{10 + self.number}"

    @property
    def link(self) -> str:
        """Name of the head's end of the link."""
        return f"{self.name}v"

    def connect(self, bridge: str) -> None:
        inside = ("netns", "exec", self.name, "ip")
        ip("netns", "add", self.name)
        ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("link", "set", self.link, "master", bridge, "up")
        ip(*inside, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip(*inside, "link", "set", device, "up")

    def start(self, *options: str) -> None:
        """Start a raylet, by default one with a processor for one worker."""
        command = [
            "ip", "netns", "exec", self.name, *RAY, f"--node-ip-address={self.address}",
            *(options or (f"--address={HEAD}:{PORT}", "--num-cpus=1")),
            "--object-store-memory=100000000", "--disable-usage-stats", "--block",
        ]  # fmt: skip
        self.raylet = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        until(self._listens)  # or a second one chooses the name of this one's socket, and ends

    def _listens(self) -> bool:
        """Return whether its raylet has bound the socket that its command names."""
        commands = (command_of(process) for process in self.processes())
        sockets = [
            Path(word.partition("=")[2])
            for command in commands
            for word in command.decode().split("\0")
            if word.startswith("--raylet_socket_name=") and "/raylet/raylet\0" in command.decode()
        ]
        return any(one.exists() for one in sockets)

    def processes(self) -> list[int]:
        shown = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, timeout=PATIENCE)
        return [int(process) for process in shown.stdout.split()]

    def kill(self) -> None:
        """End all that runs on it at once, as a host does that loses its power."""
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if self.raylet is not None:
            self.raylet.wait(PATIENCE)

    def cut(self) -> None:
        ip("link", "set", self.link, "down")

    def mend(self) -> None:
        ip("link", "set", self.link, "up")

    def remove(self) -> None:
        self.kill()
        delete("link", self.link)  # it may outlive the other
        delete("netns", self.name)


def command_of(process: int) -> bytes:
    with suppress(OSError):  # it has ended
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""


@contextmanager
def network(environment: dict[str, str], number: int = 2) -> Iterator[list[Host]]:
    """Yield hosts on a bridge, which has the address of this one. Processes have the network in turns."""
    hosts = [Host(n, environment) for n in range(1, MOST_HOSTS + 1)]
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second bridge with this address would take the first one's packets
        try:
            remove(hosts)  # of a run that was killed
            ip("link", "add", BRIDGE, "type", "bridge")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces can be made here: {getattr(error, 'stderr', error)}")
        try:
            ip("address", "add", f"{HEAD}/24", "dev", BRIDGE)
            ip("link", "set", BRIDGE, "up")
            for host in hosts[:number]:
                host.connect(BRIDGE)
            yield hosts[:number]
        finally:
            remove(hosts)


def remove(hosts: list[Host]) -> None:
    """Remove hosts with all that runs on them, and the bridge."""
    for host in hosts:
        host.remove()
    delete("link", BRIDGE)


@dataclass
class Hosts:
    """A cluster with a worker on each of two hosts."""

    running: Running
    hosts: list[Host]

    def busy(self) -> str:
        """Return the worker with the most requests: where something fails, something is lost."""
        until(lambda: any(one["open"] for one in self.running.workers().values()))
        workers = self.running.workers()
        return max(workers, key=lambda name: workers[name]["open"])

    def of_worker(self, name: str) -> Host:
        process = self.running.workers()[name]["process"]
        return next(host for host in self.hosts if process in host.processes())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    secrets = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 64}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in secrets.items():
            patch.setenv(name, value)
        with network({**os.environ}) as hosts:
            head = [
                *RAY, "--head", f"--node-ip-address={HEAD}", f"--port={PORT}", "--num-cpus=0", "--disable-usage-stats",
                "--include-dashboard=false", "--object-store-memory=100000000", "--block",
            ]  # fmt: skip
            pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
            with subprocess.Popen(head, **pipes) as process:
                try:
                    until(lambda: _open(HEAD, PORT))
                    for host in hosts:
                        host.start()
                    with up(tmp_path_factory.mktemp("up"), "--address", f"{HEAD}:{PORT}", hosts=2) as running:
                        yield Hosts(running, hosts)
                        running.process.terminate()
                        running.process.wait(PATIENCE)
                finally:
                    os.killpg(process.pid, signal.SIGKILL)


def _open(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), 1):
        return True
    return False


@dataclass(frozen=True)
class Answers:
    """Outcomes of the requests that ran while something failed."""

    undisturbed: list[bool]  # of each: tokens and log probabilities are those of a quiet cluster
    counted: dict[str, int]  # what the router counted of them
    resumed: int  # workers that continued an answer
    pause: float  # the longest in an answer, seconds

    @property
    def all_right(self) -> bool:
        n = len(self.undisturbed)
        return all(self.undisturbed) and self.counted == {"routed": n, "answered": n}


def under_requests(running: Running, fault: Callable[[], None]) -> Answers:
    """Answer requests while a fault happens: clients ask without a pause until it is over, and at least EACH times."""
    whole = running.story(TOKENS)
    assert len(whole) == TOKENS
    pauses: list[float] = []
    over = threading.Event()

    def ask() -> list[bool]:
        undisturbed: list[bool] = []
        while len(undisturbed) < EACH or not over.is_set():
            times = [time.monotonic()]
            said = running.story(TOKENS, lambda _, times=times: times.append(time.monotonic()))
            pauses.append(max(later - earlier for earlier, later in pairwise(times)))
            undisturbed.append(said == whole)
        return undisturbed

    before = running.counts()
    with ThreadPoolExecutor(AT_ONCE) as clients:
        asked = [clients.submit(ask) for _ in range(AT_ONCE)]
        try:
            until(lambda: len(pauses) >= AT_ONCE)
            fault()
        finally:
            over.set()
        undisturbed = [right for one in asked for right in one.result(PATIENCE)]
    after = running.counts()
    counted = {name: after.get(name, 0) - before.get(name, 0) for name in ("routed", "answered", "failed", "diverged")}
    resumed = after.get("resumed", 0) - before.get("resumed", 0)
    return Answers(undisturbed, {name: count for name, count in counted.items() if count}, resumed, max(pauses))


def show(fault: str, answers: Answers) -> None:
    n, pause = len(answers.undisturbed), answers.pause
    print(f"\n{fault}: {n} answers, resumed {answers.resumed} times, the longest pause in one took {pause:.1f} s")


def test_workers_are_on_hosts_of_their_own(cluster: Hosts) -> None:
    names = cluster.running.ups()
    assert sorted(cluster.of_worker(name).number for name in names) == [1, 2]


@pytest.mark.parametrize(("seconds", "times"), [(0.5, 3), (2.0, 1)])
def test_a_worker_that_stalls(cluster: Hosts, seconds: float, times: int) -> None:
    """For less time than a router waits for a sign of life, and for more: the second time in a minute it is ended."""
    running = cluster.running

    def stall() -> None:
        worker = running.workers()[cluster.busy()]["process"]
        for _ in range(times):
            os.kill(worker, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(worker, signal.SIGCONT)
            time.sleep(0.5)

    answers = under_requests(running, stall)
    show(f"a worker that stalls {times} times for {seconds} s", answers)
    assert answers.all_right, answers
    assert answers.resumed or seconds < HEARTBEAT_TIMEOUT_SECONDS, answers
    until(lambda: len(running.ups()) == 2)


@pytest.mark.parametrize("seconds", [0.3, 3.0])
def test_a_link_that_is_cut_and_mended(cluster: Hosts, seconds: float) -> None:
    def cut() -> None:
        host = cluster.of_worker(cluster.busy())
        host.cut()
        time.sleep(seconds)
        host.mend()

    answers = under_requests(cluster.running, cut)
    show(f"a link that is cut for {seconds} s", answers)
    assert answers.all_right, answers
    assert answers.resumed or seconds < HEARTBEAT_TIMEOUT_SECONDS, answers
    until(lambda: len(cluster.running.ups()) == 2)


def test_a_link_that_flaps(cluster: Hosts) -> None:
    def flap() -> None:
        host = cluster.of_worker(cluster.busy())
        for _ in range(8):
            host.cut()
            time.sleep(0.4)
            host.mend()
            time.sleep(0.6)

    answers = under_requests(cluster.running, flap)
    show("a link that is cut eight times in eight seconds", answers)
    assert answers.all_right, answers
    until(lambda: len(cluster.running.ups()) == 2)


def test_a_host_that_dies_is_replaced_when_it_is_back(cluster: Hosts) -> None:
    running, old, died = cluster.running, cluster.running.ups(), []

    def die() -> None:
        died.append(cluster.of_worker(cluster.busy()))
        died[0].kill()

    answers = under_requests(running, die)
    show("a host that dies", answers)
    assert answers.all_right, answers
    assert answers.resumed, answers
    assert len(running.ups()) == 1
    began = time.monotonic()
    died[0].start()
    until(lambda: len(running.ups()) == 2)
    print(f"a worker on the host that is back serves after {time.monotonic() - began:.0f} s")
    assert set(running.ups()) != set(old)
    assert sorted(cluster.of_worker(name).number for name in running.ups()) == [1, 2]
    answers = under_requests(running, lambda: None)
    show("none", answers)
    assert answers.all_right, answers
