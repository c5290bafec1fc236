"""Rolling upgrades: the order of steps, and a router whose workers are replaced under requests, without Ray."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.cluster.cost import Role
from headwater.cluster.encryption import WorkerKeys
from headwater.cluster.router import Router
from headwater.cluster.upgrade import Drain, Member, Start, Upgrade
from headwater.config import ServeConfig
from headwater.errors import ConfigError
from tests.cluster.fake import MODEL, PATIENCE, FakeWorker, FormulaEngine, Received, asking, formula, token_after, until

pytest.importorskip("ray", reason="Ray is not installed")

from headwater.cluster import ray_workers
from headwater.cluster.ray_workers import RayWorkers

OLD = ServeConfig(memory=10**9)


def members(roles: dict[Role, int]) -> list[Member]:
    """Return the workers of a cluster before an upgrade."""
    each = [role for role, number in roles.items() for _ in range(number)]
    return [Member(f"w{i}", role, False, False, True) for i, role in enumerate(each)]


def taken(upgrade: Upgrade, roles: dict[Role, int]) -> list[tuple[str, int]]:
    """Take all steps at once; return each, and how many workers then serve."""
    found, names, steps = members(roles), iter(range(100, 200)), []
    while not upgrade.ended:
        match upgrade.step(found, roles):
            case Start(role):
                found.append(Member(f"w{next(names)}", role, True, False, False))
            case Drain(name):
                found = [replace(one, is_draining=True) if one.name == name else one for one in found]
        steps.append((f"{len(found)} workers", sum(one.serves and not one.is_draining for one in found)))
        assert upgrade.step(found, roles) is None, "it waits for what it has begun"
        found = [replace(one, serves=True) for one in found if not one.is_draining]
    assert all(one.is_new for one in found)
    assert Counter(one.role for one in found) == roles
    return steps[:-1]


@pytest.mark.parametrize("roles", [{Role.BOTH: 3}, {Role.PREFILL: 1, Role.DECODE: 2}])
def test_as_many_serve_as_before_with_one_worker_more(roles: dict[Role, int]) -> None:
    assert taken(Upgrade("1", OLD), roles) == [("4 workers", 3)] * 6


@pytest.mark.parametrize("roles", [{Role.BOTH: 3}, {Role.PREFILL: 1, Role.DECODE: 2}])
def test_drained_first_one_less_serves_and_there_is_never_one_more(roles: dict[Role, int]) -> None:
    assert taken(Upgrade("1", OLD, drain_first=True), roles) == [("3 workers", 2)] * 6


def test_a_worker_that_is_lost_meanwhile_is_replaced_by_a_new_one() -> None:
    roles = {Role.BOTH: 2}
    draining, loading = replace(members(roles)[0], is_draining=True), Member("w2", Role.BOTH, True, False, False)
    assert Upgrade("1", OLD).step([draining, loading], roles) == Start(Role.BOTH)
    assert Upgrade("1", OLD, drain_first=True).step([draining, loading], roles) is None
    assert Upgrade("1", OLD).step([members(roles)[0]], roles) == Start(Role.BOTH)


def test_drained_first_another_one_that_is_lost_is_replaced_at_once() -> None:
    draining = replace(members({Role.BOTH: 2})[0], is_draining=True)
    assert Upgrade("1", OLD, drain_first=True).step([draining], {Role.BOTH: 2}) == Start(Role.BOTH)


def test_the_only_worker_that_is_left_is_not_drained_first() -> None:
    assert Upgrade("1", OLD, drain_first=True).step(members({Role.BOTH: 1}), {Role.BOTH: 1}) == Start(Role.BOTH)


def test_surplus_workers_are_drained_down_to_the_wanted_number() -> None:
    three = members({Role.BOTH: 3})
    new = replace(three[2], is_new=True)
    assert Upgrade("1", OLD).step([*three[:2], new], {Role.BOTH: 1}) == Drain("w0")
    assert Upgrade("1", OLD).step([three[1], new], {Role.BOTH: 1}) == Drain("w1")


# -- under requests


@dataclass(eq=False)
class Result:
    """Result of a call of an actor."""

    there: threading.Event = field(default_factory=threading.Event)
    value: Any = None

    def set(self, value: Any = None) -> None:
        self.value = value
        self.there.set()


class FakeHost:
    """Actor of a worker: its engine's answers depend on `placement`, `no_model` does not start, `dumb` never joins."""

    def __init__(self, config: ServeConfig) -> None:
        self._contact, self._ended, self._fake = Result(), Result(), None
        self.placement = config.placement
        self.contact, self.wait = (SimpleNamespace(remote=lambda one=one: one) for one in (self._contact, self._ended))
        self.stop = SimpleNamespace(remote=self._stop)
        if self.placement == "no_model":
            self._contact.set(ray_workers.RayError("Traceback\n ...\nCheckpointError: there is no model"))
        elif self.placement != "dumb":
            engine = FormulaEngine(other=0 if self.placement == OLD.placement else 5000)
            self._fake = FakeWorker(engine, self.placement)
            self._contact.set(self._fake.worker.contact)

    def _stop(self, seconds: float) -> Result:
        assert self._fake is not None
        assert not self._fake.worker.open_requests, "it is stopped with a request"
        self.end()
        return self._ended

    def end(self) -> None:
        if self._fake is not None and not self._ended.there.is_set():
            self._fake.kill()
            self._fake.engine.close()
            self._ended.set()


class FakeRay:
    """Ray as workers use it: actors are objects of this process."""

    def __init__(self) -> None:
        self.actors: list[FakeHost] = []

    def remote(self, host: object) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=self._start))

    def _start(self, config: ServeConfig, *rest: object, **more: object) -> FakeHost:
        self.actors.append(FakeHost(config))
        return self.actors[-1]

    def wait(self, results: list[Result], timeout: float, num_returns: int = 1) -> tuple[list[Result], list[Result]]:
        return [one for one in results if one.there.is_set()], [one for one in results if not one.there.is_set()]

    def get(self, result: Result) -> Any:
        if isinstance(result.value, Exception):
            raise result.value
        return result.value

    def kill(self, actor: FakeHost, no_restart: bool) -> None:
        actor.end()


@dataclass
class Cluster:
    """A router, its workers, and clients that ask without a pause."""

    router: Router
    workers: RayWorkers
    ray: FakeRay
    answers: list[Received] = field(default_factory=list)

    def serving(self) -> list[str]:
        """Return the placement of each worker that serves."""
        started = list(self.workers._started.values())
        return sorted(one.config.placement for one in started if self.router.serves(one.name))

    @contextmanager
    def under_requests(self) -> Iterator[list[Received]]:
        """Ask three requests at a time; all that were asked have ended afterwards."""
        asked, over = list[Received](), threading.Event()

        def ask() -> None:
            while not over.is_set():
                one = Received()
                asked.append(one)
                self.router.submit(asking([1, 2, 3], 60), one.on_event)
                one.wait()

        clients = [threading.Thread(target=ask) for _ in range(3)]
        for client in clients:
            client.start()
        try:
            yield asked
        finally:
            over.set()
            for client in clients:
                client.join(PATIENCE)

    def upgrade(self, ends: Callable[[], object] | None = None, drain_first: bool = False, **settings: Any) -> Upgrade:
        upgrade = Upgrade("1", replace(self.workers.config, **settings), drain_first)
        self.workers.begin(upgrade)
        until(ends or (lambda: upgrade.ended))
        return upgrade


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    ray = FakeRay()
    monkeypatch.setattr(ray_workers, "ray", ray)
    for name in ("IDLE_SECONDS", "POLL_SECONDS", "RESTART_SECONDS"):
        monkeypatch.setattr(ray_workers, name, 0.02)
    router = Router(MODEL, b"k" * 32, patience=1.0, heartbeat_timeout=15.0)
    workers = RayWorkers(OLD, {Role.BOTH: 2}, router, WorkerKeys(b"", b""), None, [2], False)
    router.lost = workers.lost
    router.start()
    workers.start()
    try:
        one = Cluster(router, workers, ray)
        until(lambda: len(one.serving()) == 2)
        yield one
    finally:
        workers.close()
        router.stop()


def said_by(other: int) -> tuple[int, ...]:
    """Return the answer of an engine that adds a number to each token of the formula."""
    tokens = [1, 2, 3]
    for _ in range(60):
        tokens.append(token_after(tokens, 7) + other)
    return tuple(tokens[3:])


def whole(asked: list[Received], others: tuple[int, ...]) -> list[int]:
    """Return by which engine each answer is; each is wholly of one."""
    answers = {said_by(other): other for other in others}
    assert all(one.error is None for one in asked), [one.error for one in asked]
    return [answers[tuple(one.tokens)] for one in asked]


@pytest.mark.parametrize("drain_first", [False, True])
def test_no_request_is_lost_and_each_is_answered_by_one_model(cluster: Cluster, drain_first: bool) -> None:
    least, over = [2], threading.Event()

    def count() -> None:
        while not over.wait(0.002):
            least.append(len(cluster.serving()))

    counting = threading.Thread(target=count)
    with cluster.under_requests() as asked:
        until(lambda: any(one.done.is_set() for one in asked))
        counting.start()
        upgrade = cluster.upgrade(placement="none", drain_first=drain_first)
        over.set()
        counting.join()
        n = len(asked)
        until(lambda: len(asked) > n + 3)
    by = whole(asked, (0, 5000))
    assert upgrade.error == ""
    assert (by[0], by[-1]) == (0, 5000)
    assert cluster.router.counts["routed"] == cluster.router.counts["answered"] == len(asked)
    assert cluster.serving() == ["none", "none"]
    assert min(least) == 2 - drain_first
    assert len(cluster.ray.actors) == 4
    assert cluster.workers.config.placement == "none", "what is lost from now on is replaced by such a worker"


@pytest.mark.parametrize("drain_first", [False, True])
def test_worker_that_does_not_start_ends_the_upgrade_and_others_serve(cluster: Cluster, drain_first: bool) -> None:
    with cluster.under_requests() as asked:
        upgrade = cluster.upgrade(placement="no_model", drain_first=drain_first)
        until(lambda: cluster.serving() == ["headwater", "headwater"])
    assert set(whole(asked, (0,))) == {0}
    assert upgrade.error.startswith("worker w2 could not start: CheckpointError: there is no model; the upgrade was")
    again = ["headwater"] * drain_first  # instead of the drained one
    assert [one.placement for one in cluster.ray.actors] == ["headwater", "headwater", "no_model", *again]
    cluster.upgrade(placement="none")
    assert cluster.serving() == ["none", "none"]


def test_a_worker_that_never_joins_ends_the_upgrade(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers, "JOIN_SECONDS", 0.2)
    upgrade = cluster.upgrade(placement="dumb")
    assert "worker w2 does not serve after 0 s: is there memory for one more?" in upgrade.error
    assert cluster.serving() == ["headwater", "headwater"]


def test_an_earlier_worker_that_never_serves_does_not_hold_an_upgrade_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_workers, "JOIN_SECONDS", 0.2)
    cluster.workers.config = replace(OLD, placement="dumb")
    cluster.workers.scale(3, Role.BOTH)
    until(lambda: len(cluster.workers._started) == 3)
    cluster.workers.config = OLD
    upgrade = cluster.upgrade(placement="none")
    assert (upgrade.error, cluster.serving()) == ("", ["none"] * 3)


def test_an_error_gives_an_upgrade_up_and_workers_are_looked_after(cluster: Cluster) -> None:
    def fail(*_: object, **__: object) -> FakeHost:
        raise OSError("no more processes")

    start, cluster.ray._start = cluster.ray._start, fail
    upgrade = cluster.upgrade(placement="none")
    assert upgrade.error.startswith("workers could not be checked: no more processes")
    cluster.ray._start = start
    cluster.workers.drain("w0")
    until(lambda: "w0" not in cluster.workers._started and len(cluster.serving()) == 2)


def test_another_upgrade_meanwhile_and_the_only_worker_drained_first_are_refused(cluster: Cluster) -> None:
    cluster.upgrade(ends=lambda: True, placement="dumb")
    with pytest.raises(ConfigError, match="already in progress"):
        cluster.workers.begin(Upgrade("2", OLD))
    cluster.workers.upgrade = None
    cluster.workers.scale(1, Role.BOTH)
    with pytest.raises(ConfigError, match="only worker cannot be drained"):
        cluster.workers.begin(Upgrade("2", OLD, drain_first=True))


def test_upgrade_adds_and_removes_workers(cluster: Cluster) -> None:
    upgrade = cluster.upgrade(ends=lambda: True, placement="none")
    cluster.workers.scale(3, Role.BOTH)
    until(lambda: upgrade.ended)
    assert cluster.serving() == ["none"] * 3
    cluster.workers.scale(1, Role.BOTH)
    until(lambda: len(cluster.workers._started) == 1)


def test_answer_continues_on_a_draining_worker_without_another_of_its_fingerprint(cluster: Cluster) -> None:
    """The last of the earlier workers is lost to the router for a moment while it drains."""
    upgrade, one = Upgrade("1", replace(OLD, placement="none")), Received()
    cluster.workers.scale(1, Role.BOTH)
    until(lambda: len(cluster.workers._started) == 1)
    (name,) = cluster.workers._started
    cluster.router.submit(asking([1, 2, 3], 1000), one.on_event)
    one.wait_for(10)
    cluster.workers.begin(upgrade)
    until(lambda: cluster.workers._started[name].draining)
    cluster.router.actions.put(lambda: cluster.router._remove(name, "stalled"))
    one.wait()
    assert one.error is None
    assert one.tokens == formula([1, 2, 3], 1000)
    assert cluster.router.counts["resumed"] == 1
    until(lambda: upgrade.ended)
    assert cluster.serving() == ["none"]


@pytest.mark.parametrize(
    ("workers", "hosts", "shares"),
    [
        (1, [8], "12GB and 8 threads each"),
        (3, [8], "4GB and 2 threads each"),
        (3, [8, 4, 8], "12GB and 4 threads each"),  # one on each
        (5, [8, 8], "4GB and 2 threads each"),  # three on one of them
        (2, [8, 8, 8], "12GB and 8 threads each"),
    ],
)
def test_workers_of_one_host_share_its_memory_and_cores(
    workers: int, hosts: list[int], shares: str, cluster: Cluster
) -> None:
    roles = {Role.PREFILL: workers // 2, Role.DECODE: workers - workers // 2}
    config = replace(OLD, memory=12 * 10**9)
    started = RayWorkers(config, roles, cluster.router, WorkerKeys(b"", b""), "auto", hosts, False)
    assert started.shares == shares
