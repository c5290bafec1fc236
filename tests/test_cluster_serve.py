"""`headwater cluster` as processes: workers on Ray that are killed, drained, added and taken away under requests."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

pytest.importorskip("ray", reason="Ray is not installed")

from headwater.models.files import embedded
from tests.forked import address, headwater, serving

PATIENCE = 120  # seconds
LONG = 2000  # tokens: two seconds, in which a worker is found and killed
HEADWATER = sys.executable, "-m", "headwater"
STORY = {"prompt": "Tell a story about the harbour.", "temperature": 0.9, "seed": 3, "ignore_eos": True, "logprobs": 1}


@dataclass
class Process:
    """A process of a cluster."""

    number: int
    name: str


@dataclass
class Running:
    """A cluster that is up."""

    process: subprocess.Popen[str]
    url: str
    ray: str
    said: list[str]  # lines of its output
    keys: Path  # public and secret key of each pair that was made

    def processes(self) -> list[Process]:
        """Return its processes, also Ray's: an environment that names its folder is theirs."""
        found = []
        for one in Path("/proc").iterdir():
            with suppress(OSError, ValueError):  # no process, or it has ended, or it is another user's
                if str(self.keys.parent).encode() in (one / "environ").read_bytes():
                    found.append(Process(int(one.name), (one / "cmdline").read_bytes().split(b"\0")[0].decode()))
        return found

    def cluster(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `headwater cluster` about it."""
        return headwater("cluster", *command, "--address", self.ray)

    def workers(self) -> dict[str, dict]:
        health = httpx.get(f"{self.url.removesuffix('/v1')}/health", timeout=PATIENCE).json()
        return {one["name"]: one for one in health["workers"]}

    def counts(self) -> dict[str, int]:
        return httpx.get(f"{self.url.removesuffix('/v1')}/health", timeout=PATIENCE).json()["requests"]

    def ups(self) -> list[str]:
        return [name for name, one in self.workers().items() if one["state"] == "up"]

    def pairs(self) -> list[tuple[str, str]]:
        """Return the key pairs that its processes have made."""
        return [tuple(line.split()) for line in self.keys.read_text().splitlines()]

    def story(
        self,
        tokens: int,
        reached: Callable[[int], object] = lambda count: None,
        client: httpx.Client | None = None,
        accounts: Callable[[dict], object] = lambda account: None,
        **more: object,
    ) -> list[tuple[str, float]]:
        """Return texts and log probabilities of a streamed answer.

        `reached` is called with each number of tokens, and `accounts` with the account.
        """
        body = {**STORY, "max_tokens": tokens, "stream": True, **more}
        said = []
        stream = httpx.stream if client is None else client.stream
        with stream("POST", f"{self.url}/completions", json=body, timeout=PATIENCE) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    part = json.loads(line[6:])
                    assert "error" not in part, part
                    if isinstance(part.get("headwater"), dict):
                        accounts(part["headwater"])
                    (choice,) = part["choices"] or [None]
                    if choice and choice["logprobs"]:
                        said += zip(choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], strict=True)
                        reached(len(said))
        return said


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with up(tmp_path_factory.mktemp("up")) as one:
        yield one


RECORDER = """
import zmq

made = zmq.curve_keypair

def recorded():
    pair = made()
    with open({keys!r}, "ab") as file:
        file.write(b" ".join(pair) + b"\\n")
    return pair

zmq.curve_keypair = recorded
"""


@contextmanager
def up(folder: Path, *more: str, workers: int = 2, hosts: int = 1) -> Iterator[Running]:
    """Yield a cluster that was started with more options; its key pairs are written to the folder.

    `hosts`: of which each has as many workers.
    """
    keys = folder / "keys"
    (folder / "sitecustomize.py").write_text(RECORDER.format(keys=str(keys)))
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    size = ("--workers", f"{workers}", "--memory", f"{200 * workers // hosts}MB")
    command = [*HEADWATER, "cluster", "up", *size, "--port", "0", *more]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        said: list[str] = []
        try:
            while not said or "Deterministic: " not in said[-1]:
                said.append(process.stdout.readline())
                assert said[-1], "".join(said)
            text = "".join(said)
            threading.Thread(target=said.extend, args=(process.stdout,), daemon=True).start()
            url, ray = re.search(r"http://127\.0\.0\.1:\d+/v1", text)[0], re.search(r"Ray at ([\d.]+:\d+)", text)[1]
            assert "200MB and 1 thread each" in text
            assert "Deterministic: yes" in text
            yield Running(process, url, ray, said, keys)
        finally:
            process.kill()


def shared_with(process: int) -> set[str]:
    """Return the memory of weights that a process has mapped."""
    return {
        line.split()[4]
        for line in Path(f"/proc/{process}/maps").read_text().splitlines()
        if "headwater-weights" in line
    }


@pytest.mark.full
def test_workers_hold_the_weights_once(running: Running) -> None:
    first, second = (shared_with(one["process"]) for one in running.workers().values())
    assert first == second != set(), "loading at once, each may have laid out weights that both hold"


@pytest.mark.full
def test_threads_and_environment_are_set_before_a_worker_starts(running: Running) -> None:
    """A process's first environment is that before it imports anything. Ray's store is small, its monitor off."""
    for one in running.workers().values():
        assert {"OMP_NUM_THREADS=1", "RAY_memory_monitor_refresh_ms=0"} <= started_with(one["process"], "environ")
    (raylet,) = (one.number for one in running.processes() if one.name.endswith("/raylet"))
    assert "RAY_memory_monitor_refresh_ms=0" in started_with(raylet, "environ")
    assert "--object_store_memory=100000000" in started_with(raylet, "cmdline")


def started_with(process: int, what: str) -> set[str]:
    """Return the variables or the arguments that a process was started with."""
    return set(Path(f"/proc/{process}/{what}").read_text(errors="replace").split("\0"))


def test_answer_continues_after_its_worker_is_killed(running: Running) -> None:
    """Killed after the first token and later, and another worker is started each time."""
    tokens = 800
    whole = running.story(tokens)
    assert len(whole) == tokens
    before = running.counts()
    for after in (1, 100):

        def kill(count: int, after: int = after) -> None:
            if count == after:
                (busy,) = (one for one in running.workers().values() if one["open"])
                os.kill(busy["process"], signal.SIGKILL)

        assert running.story(tokens, kill) == whole
        until(lambda: len(running.ups()) == 2)
    counts = running.counts()
    assert counts["routed"] - before["routed"] == counts["answered"] - before["answered"] == 2
    assert counts["resumed"] >= 2
    assert "diverged" not in counts
    assert "failed" not in counts


@pytest.mark.full
def test_workers_are_drained_added_and_removed_under_requests(running: Running) -> None:
    with ThreadPoolExecutor(4) as clients:
        whole = running.story(150)
        asked = [clients.submit(running.story, 150) for _ in range(12)]
        assert "no worker is named 'w99'; the workers are" in running.cluster("drain", "w99").stderr
        first = running.ups()[0]
        assert running.cluster("drain", first).returncode == 0
        until(lambda: first not in running.workers() and len(running.ups()) == 2)
        assert running.cluster("scale", "3").returncode == 0
        until(lambda: len(running.ups()) == 3)
        assert running.cluster("scale", "1").returncode == 0
        until(lambda: len(running.workers()) == 1)
        assert [one.result() for one in asked] == [whole] * 12
    assert "failed" not in running.counts()


@pytest.mark.full
def test_status_shows_workers_and_outcomes_of_requests(running: Running) -> None:
    running.story(3)
    until(running.ups)
    name = running.ups()[0]
    row = rf"│ {name} +│ up +│ [0-9a-f]{{12}} │ +{running.workers()[name]['process']} │ +[1-9]"
    until(lambda: re.search(row, running.cluster("status").stdout))  # it joins again if it was not heard for 0.8 s
    shown = running.cluster("status").stdout
    assert re.search(r"│ answered +│ +\d+ │", shown)
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.full
def test_metrics_and_figures_are_the_sums_of_all_workers(running: Running) -> None:
    base = running.url.removesuffix("/v1")
    until(lambda: httpx.get(f"{base}/cache").json()["memory"]["pages"]["total"] > 0)
    metrics = httpx.get(f"{base}/metrics").text
    assert re.search(r'headwater_computed_tokens_total\{kind="decode"\} [1-9]', metrics)
    assert re.search(r'headwater_routed_requests_total\{outcome="cached_as_predicted"\} [1-9]', metrics)
    assert httpx.get(base).status_code == 200
    assert httpx.post(f"{base}/cache/segments", json={"texts": ["a b c"]}).status_code == 501


@pytest.mark.full
def test_commands_arrive_again_after_the_mailbox_has_ended(running: Running) -> None:
    (mailbox,) = (one for one in running.processes() if one.name == "ray::Mailbox")
    os.kill(mailbox.number, signal.SIGKILL)
    until(lambda: running.ups()[0] in running.cluster("status").stdout)
    (restarted,) = (one for one in running.processes() if one.name == "ray::Mailbox")
    assert restarted.number != mailbox.number


@pytest.mark.full
def test_every_socket_of_a_worker_asks_for_curve(running: Running) -> None:
    """Greetings of ZMTP name the mechanism. A worker has four sockets: requests, live events, replays, pulls."""
    until(lambda: running.ups())
    for name in running.ups():
        found = [mechanism_at(one) for one in listening(running.workers()[name]["process"])]
        assert [one for one in found if one is not None] == [b"CURVE"] * 4


def listening(process: int) -> set[tuple[str, int]]:
    """Return the addresses and ports of IPv4 on which a process listens."""
    inodes = {os.readlink(one) for one in Path(f"/proc/{process}/fd").iterdir() if one.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    own = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    return {(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)) for host, port in own}


def mechanism_at(address: tuple[str, int]) -> bytes | None:
    """Return the mechanism of a ZeroMQ socket, or None if another program listens."""
    with socket.create_connection(address, PATIENCE) as connection:
        connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00")  # a greeting up to its version
        with connection.makefile("rb") as file:
            if file.read(1) != b"\xff":
                return None
            return file.read(63)[11:31].rstrip(b"\0")


@pytest.mark.full
def test_secret_keys_are_in_no_command_environment_or_log(running: Running) -> None:
    pairs = running.pairs()
    assert len(pairs) >= 3, "one of the router, and one of each worker"
    secrets = [secret for _, secret in pairs]
    until(lambda: running.ups())
    worker = running.workers()[running.ups()[0]]["process"]
    logs = Path(os.readlink(f"/proc/{worker}/fd/1")).parent
    shown = {str(log): log.read_text(errors="replace") for log in logs.rglob("*") if log.is_file()}
    shown["output"] = "".join(running.said)
    for process in Path("/proc").iterdir():
        for name in ("cmdline", "environ"):
            with suppress(OSError):  # another user's, or it has ended
                shown[str(process / name)] = (process / name).read_text(errors="replace")
    own = f"/proc/{running.process.pid}/cmdline"
    assert "cluster\0up" in shown[own]
    assert any("/logs/worker-" in name for name in shown)
    assert [(name, secret) for name, text in shown.items() for secret in secrets if secret in text] == []


@pytest.mark.full
def test_down_ends_it(running: Running) -> None:
    assert running.cluster("down").returncode == 0
    assert running.process.wait(PATIENCE) == 0
    assert "no Ray cluster at" in running.cluster("status").stderr


@pytest.mark.full
def test_three_workers_two_routers_and_ray_take_at_most_four_gigabytes(tmp_path: Path) -> None:
    """Pages that processes share count once: `Pss`."""
    with up(tmp_path, "--routers", "2", workers=3) as running, ThreadPoolExecutor(6) as clients:
        list(clients.map(running.story, [LONG] * 6))
        kilobytes = {}
        for one in running.processes():
            with suppress(OSError):  # it has ended
                found = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{one.number}/smaps_rollup").read_text(), re.M)
                kilobytes[f"{one.name.rpartition('/')[2]} {one.number}"] = int(found[1])
        for name, size in sorted(kilobytes.items(), key=lambda one: -one[1]):
            print(f"{size / 1e3:8.0f} MB  {name}")
        assert sum(name.startswith("ray::Host") for name in kilobytes) == 3
        assert sum(kilobytes.values()) <= 4e6


@pytest.mark.full
def test_killed_router_breaks_only_its_own_answers(tmp_path: Path) -> None:
    """Both serve on one port. Its requests are cancelled, and another router is started, which serves."""
    with up(tmp_path, "--routers", "2") as running, ThreadPoolExecutor(2) as clients:
        base = running.url.removesuffix("/v1")
        whole = running.story(LONG)

        def with_router() -> tuple[httpx.Client, int]:
            client = httpx.Client(timeout=PATIENCE)  # its one connection stays with the router that took it
            return client, client.get(f"{base}/health").json()["router"]

        found: dict[int, httpx.Client] = {}
        until(lambda: found.update([with_router()[::-1]]) or len(found) == 2)
        reached = {router: threading.Event() for router in found}
        asked = {
            router: clients.submit(
                running.story, LONG, lambda n, router=router: n == 5 and reached[router].set(), client
            )
            for router, client in found.items()
        }
        for event in reached.values():
            assert event.wait(PATIENCE)
        killed, other = found
        os.kill(killed, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(httpx.HTTPError):
            asked[killed].result(PATIENCE)
        broke = time.monotonic() - begun
        until(lambda: sum(one["running"] for one in running.workers().values()) <= 1)
        after = time.monotonic() - begun
        goes_on = "still ran" if not asked[other].done() else "had ended, so this says nothing"
        print(f"streams broke after {broke:.2f} s, requests were cancelled after {after:.2f}; the other one {goes_on}")
        assert asked[other].result(PATIENCE) == whole
        until(lambda: {one for _, one in (with_router() for _ in range(4))} - {killed, other})
        until(lambda: not any(one["running"] for one in running.workers().values()))
        assert running.story(LONG) == whole
        shown = running.cluster("status").stdout
        assert str(other) in shown
        assert str(killed) not in shown
        assert running.cluster("down").returncode == 0
        assert running.process.wait(PATIENCE) == 0


def changed(folder: Path) -> Path:
    """Return a copy of the embedded model with other weights."""
    copy = Path(shutil.copytree(embedded(), folder / "changed"))
    tensors = load_file(copy / "model.safetensors")
    name = next(name for name in tensors if name.endswith("norm.weight"))
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def of_one_server(model: Path, tokens: int) -> list[tuple[str, float]]:
    """Return the story of a server without a cluster."""
    with serving(str(model), "--port", "0", "--threads", "1") as (process, said):
        alone = Running(process, address(said), "", said, Path())
        return alone.story(tokens)


@pytest.mark.full
@pytest.mark.parametrize("more", [(), ("--routers", "2"), ("--prefill", "1", "--decode", "1")])
def test_an_upgrade_to_another_model_loses_no_request(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Each answer is that of one server, with the earlier model or the new one; one that does not load is given up."""
    new, tokens, at_once = changed(tmp_path), 300, 3
    models = {"old": of_one_server(embedded(), tokens), "new": of_one_server(new, tokens)}
    assert models["old"] != models["new"]
    answers, over = list[str](), threading.Event()

    def ask(running: Running) -> None:
        while not over.is_set():
            said = running.story(tokens)
            answers.append(next((name for name, whole in models.items() if said == whole), "neither"))

    with up(tmp_path, *more) as running, ThreadPoolExecutor(at_once) as clients:
        until(lambda: len(running.ups()) == 2)
        before = {one["fingerprint"] for one in running.workers().values()}
        asked = [clients.submit(ask, running) for _ in range(at_once)]
        until(lambda: len(answers) >= at_once)
        try:
            wrong = running.cluster("upgrade", str(tmp_path))
            assert "which is not a folder with a config.json" in wrong.stderr
            (new / "model.safetensors").rename(tmp_path / "kept")
            broken = running.cluster("upgrade", str(new))
            assert re.search("worker w2 could not start: .*the upgrade was aborted", broken.stderr), broken
            assert {one["fingerprint"] for one in running.workers().values()} == before
            (tmp_path / "kept").rename(new / "model.safetensors")
            began = time.monotonic()
            done = running.cluster("upgrade", str(new))
            print(f"\n{done.stdout}{time.monotonic() - began:.0f} s, {len(answers)} answers")
            assert done.returncode == 0, done.stderr
            assert "all 2 workers have the new settings" in done.stdout
            n = len(answers)
            until(lambda: len(answers) >= n + 2 * at_once)
        finally:
            over.set()
        for one in asked:
            one.result(PATIENCE)
        counts, found = running.counts(), {one["fingerprint"] for one in running.workers().values()}
        assert len(found) == 1
        assert not found & before
    print(f"{answers.count('old')} with the earlier model, {answers.count('new')} with the new one, {counts}")
    assert set(answers) == {"old", "new"}
    assert answers[-1] == "new"
    if "--routers" not in more:
        assert counts["routed"] == counts["answered"] == len(answers)
    assert "failed" not in counts
    assert "diverged" not in counts


HOSTS = """
from ray.cluster_utils import Cluster

node = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 * 10**6}
hosts = Cluster(initialize_head=True, head_node_args={**node, "node_ip_address": "127.0.0.2"})
hosts.add_node(**node, node_ip_address="127.0.0.3")
print("Ray at", hosts.address, flush=True)
input()
hosts.shutdown()
"""


@pytest.mark.full
def test_on_several_hosts_each_worker_listens_at_its_own_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of Ray with addresses of their own stand for two hosts."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t" * 64)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOSTS], **pipes) as hosts:
        try:
            ray = next(line for line in hosts.stdout if line.startswith("Ray at")).split()[-1]
            with up(tmp_path, "--address", ray, hosts=2) as running:
                assert len(running.story(20)) == 20
                found = [listening(one["process"]) for one in running.workers().values()]
                addresses = [{host for host, port in each if mechanism_at((host, port))} for each in found]
                assert sorted(addresses, key=str) == [{"127.0.0.2"}, {"127.0.0.3"}]
                running.process.terminate()
                running.process.wait(PATIENCE)
        finally:
            hosts.communicate("\n", PATIENCE)


def test_kv_events_are_refused() -> None:
    wrong = headwater("cluster", "up", "--kv-events")
    assert wrong.returncode == 2
    assert "the workers of a cluster publish to their router only" in wrong.stderr


def test_settings_are_checked_before_anything_starts() -> None:
    wrong = headwater("cluster", "up", "--rule", "best")
    assert wrong.returncode == 2
    assert "rule is 'best', must be one of least_cost, round_robin, least_loaded" in wrong.stderr


@pytest.mark.full
def test_a_cluster_with_workers_that_prefill(tmp_path: Path) -> None:
    """Answers are decoded meanwhile, and the same prompt has the same answer without prefill apart."""
    long = {**STORY, "prompt": "the tide comes in " * 500, "max_tokens": 20}

    def asked(one: Running) -> dict:
        return httpx.post(f"{one.url}/completions", json=long, timeout=PATIENCE).json()

    with up(tmp_path, "--prefill", "1", "--decode", "1") as one, ThreadPoolExecutor(4) as clients:
        until(lambda: len(one.ups()) == 2)
        roles = {worker["role"]: name for name, worker in one.workers().items()}
        assert set(roles) == {"prefill", "decode"}
        stories = [clients.submit(one.story, LONG) for _ in range(4)]
        until(lambda: one.workers()[roles["decode"]]["running"] == 4)
        apart = asked(one)
        assert len({tuple(story.result()) for story in stories}) == 1
        account = apart["headwater"]
        assert account["prefilled_by"] == roles["prefill"]
        assert account["handed_over_tokens"] > account["prompt_tokens"] - 64
        assert one.counts()["handed_over"] == 1
        shown = one.cluster("status").stdout
        assert re.search(rf"│ prefill +│ {roles['prefill']} +│", shown)
        metrics = httpx.get(f"{one.url.removesuffix('/v1')}/metrics").text
        assert f"headwater_handed_over_tokens_total {account['handed_over_tokens']:.1f}" in metrics
        assert "no worker has role both" in one.cluster("scale", "2").stderr.replace("\n", " ")
        one.cluster("drain", roles["prefill"])  # which of both ways takes less time depends on the machine
        whole = httpx.post(f"{one.url}/completions", json={**long, "cache_salt": "another"}, timeout=PATIENCE).json()
    assert whole["headwater"]["prefilled_by"] is None
    assert whole["choices"] == apart["choices"]


TOOL = {"name": "look_up", "parameters": {"type": "object", "properties": {"name": {"type": "string"}}}}
ASKED = {
    "two answers": {"n": 2, "seed": 5, "logprobs": True},
    "a tool call": {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required", "seed": 3},
    "JSON": {"response_format": {"type": "json_object"}, "seed": 4},
    "a stream": {"stream": True, "seed": 6, "logprobs": True},
}


def chat(url: str, number: int, **more: object) -> tuple[list[str | None], list[object]]:
    """Return for each answer the worker that prefilled it for another one, and its text without ids."""
    asked = [
        {"role": "system", "content": f"{number} " + "the tide comes in " * 400},
        {"role": "user", "content": "Who is there?"},
    ]
    body = {"messages": asked, "max_tokens": 30, **more}
    answer = httpx.post(f"{url}/chat/completions", json=body, timeout=PATIENCE).text
    if more.get("stream"):
        parts = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    else:
        parts = [json.loads(answer)]
    accounts = [one for part in parts if "headwater" in part for one in [part["headwater"]]]
    accounts = accounts[0] if isinstance(accounts[0], list) else accounts
    said = json.dumps([part["choices"] for part in parts if part["choices"]])
    return [one["prefilled_by"] for one in accounts], [re.sub(r'"call_\w+"', '"call"', said)]


@pytest.mark.full
def test_prompts_prefilled_apart_have_equal_answers(tmp_path: Path) -> None:
    """Each chat is requested during other answers, and again in a cluster whose workers have no roles.

    Measured speeds decide whether one is prefilled apart: if it is not, another one is asked for.
    """
    folders = [tmp_path / "roles", tmp_path / "none"]
    for folder in folders:
        folder.mkdir()
    apart, numbers = {}, count()
    with up(folders[0], "--prefill", "1", "--decode", "1") as one, ThreadPoolExecutor(4) as clients:
        until(lambda: len(one.ups()) == 2)
        roles = {worker["role"]: name for name, worker in one.workers().items()}
        for name, more in ASKED.items():
            by = [None]
            while by != [roles["prefill"]] * more.get("n", 1):
                number = next(numbers)
                assert number < 4 * len(ASKED), f"{name}: prefilled by {by}"
                stories = [clients.submit(one.story, LONG) for _ in range(4)]
                until(lambda: one.workers()[roles["decode"]]["running"] == 4)
                by, said = chat(one.url, number, **more)
                for story in stories:
                    story.result()
            apart[name] = number, said
    with up(folders[1]) as one:
        for name, more in ASKED.items():
            number, said = apart[name]
            by, whole = chat(one.url, number, **more)
            assert set(by) == {None}, name
            assert whole == said, name
