"""Workers with another instruction set or number of threads are not mixed; with another instruction set bits change.

Each worker is a process of its own. The control removes the check of pools: all workers report one fingerprint, so
that a prefix is pulled and an answer continues on a worker that computes other bits. Two and three threads gave the
bits of one, so that they cannot be a control.
"""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from unittest import mock

import pytest

from benchmarks.worker_processes import PATIENCE, worker_config
from headwater.cli.router_process import router_of
from headwater.cluster.cost import Candidate, Choice, Prompt
from headwater.cluster.encryption import RouterKeys, WorkerKeys
from headwater.cluster.hosting import Host
from headwater.cluster.router import Router
from headwater.engine.proof import fingerprint as fingerprints
from headwater.tiers.fingerprint import Fingerprint
from tests import processors
from tests.cluster.fake import until
from tests.cluster.test_routed_answers import Whole, ask, generation, settle
from tests.exactness.rig import words

pytestmark = pytest.mark.full

CONFIG = replace(worker_config(200 * 10**6), dtype="bfloat16")  # `auto` depends on the processor
LESSER = [name for name in processors.had() if name in ("AVX2", "AVX-512")]
ANSWER_TOKENS = 1000  # a second, in which a worker is killed
DRIFT_TOKENS = 60  # rounding to bfloat16 hides the difference of AVX-512 and AMX in the first 22 tokens


class Named(Choice):
    """The worker with a name, as long as it is there."""

    name = "own"

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> int:
        return next((i for i, one in enumerate(candidates) if one.name == self.name), 0)


def serve(threads: int, keys: WorkerKeys, pooled: bool, pipe: Connection) -> None:
    """Run a worker until the other end of the pipe is closed. `pooled`: by its own fingerprint."""
    if not pooled:
        fingerprints.fingerprint = lambda *given: Fingerprint.of({"probe": "one"})  # type: ignore[assignment]
    host = Host(replace(CONFIG, threads=threads), keys, lambda: "127.0.0.1", share_weights=False)
    pipe.send(host.contact())
    try:
        pipe.recv()
    except EOFError:
        host.stop()


class Unlike:
    """A router over two workers, of which the second computes otherwise."""

    def __init__(self, router: Router, choice: Named, processes: dict[str, multiprocessing.Process]) -> None:
        self.router, self._choice, self._processes = router, choice, processes

    def at(self, name: str, tokens: int = DRIFT_TOKENS) -> Whole:
        """Return the answer of the worker with a name; what it caches is known to the router then."""
        self._choice.name = name
        answer = ask(self.router, generation("drawn", words(700, "unlike"), tokens)).wait()
        settle(self.router)
        return answer

    def killed(self, name: str) -> Whole:
        """Return the answer of a worker that is killed in the middle of it, after DRIFT_TOKENS tokens or more."""
        self._choice.name = name
        answer = ask(self.router, generation("drawn", words(700, "unlike"), ANSWER_TOKENS))
        answer.wait_for(DRIFT_TOKENS)
        self._processes[name].kill()
        self.router.leave(name)
        return answer.wait()


@contextmanager
def unlike(processor: str | None, threads: int, pooled: bool) -> Iterator[Unlike]:
    keys, spawn, choice = RouterKeys.new(), multiprocessing.get_context("spawn"), Named()
    plain = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    others = {"own": (plain, 1), "other": (processors.environment(processor) if processor else plain, threads)}
    with ExitStack() as stack:
        router = router_of(CONFIG, keys, "least_cost")
        router.assigning.selection.choice, router.links.heartbeat_timeout = choice, PATIENCE
        router.assigning.patience = 0.5
        router.start()
        stack.callback(router.stop)
        processes, pipes = {}, {}
        for name, (variables, number) in others.items():
            pipes[name], theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(number, keys.for_workers, pooled, theirs), daemon=True)
            with mock.patch.dict(os.environ, variables, clear=True):
                process.start()
            theirs.close()
            stack.callback(process.join, PATIENCE)
            stack.callback(pipes[name].close)
            processes[name] = process
        for name, pipe in pipes.items():
            router.join(name, pipe.recv())
        assert router.wait_for(2, PATIENCE), "workers are missing"
        until(lambda: all(link.follower and link.follower.picture.is_whole for link in router.links.values()))
        yield Unlike(router, choice, processes)


OTHERS = [pytest.param(name, 1, id=name) for name in LESSER] + [pytest.param(None, 2, id="2 threads")]


@pytest.mark.parametrize(("processor", "threads"), OTHERS)
def test_unlike_workers_are_not_mixed(processor: str | None, threads: int) -> None:
    with unlike(processor, threads, pooled=True) as cluster:
        assert len({one["fingerprint"] for one in cluster.router.state()["workers"]}) == 2
        cluster.at("own")
        other = cluster.at("other")
        assert other.finished.account.loaded_from is None, "nothing is pulled"
        assert cluster.router.counts["told_of_peers"] == 0
        assert "no worker with the same fingerprint" in str(cluster.killed("own").error)
        assert cluster.router.counts["diverged"] == 0


@pytest.mark.parametrize("processor", LESSER)
def test_without_pools_another_instruction_set_changes_bits(processor: str) -> None:
    """Control: after a pull an answer has other bits, and one that continues on the other worker is detected."""
    with unlike(processor, 1, pooled=False) as cluster:
        own, pulled = cluster.at("own"), cluster.at("other")
        assert pulled.finished.account.loaded_from == "peer"
        assert pulled.comparable != own.comparable
        assert "their bits differ" in str(cluster.killed("own").error)
        assert cluster.router.counts["diverged"] == 1
