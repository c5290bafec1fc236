"""Workers in processes of this machine, behind routers in this one: for benchmarks of a cluster without Ray."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from headwater.cli.router_process import router_of
from headwater.cluster.encryption import RouterKeys, WorkerKeys
from headwater.cluster.hosting import Host
from headwater.cluster.router import Router
from headwater.cluster.sockets import Contact
from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.models.files import embedded
from headwater.schedule.step import Step

PATIENCE = 300.0  # seconds


def worker_config(memory: int, max_running: int = 16) -> ServeConfig:
    """Return the settings of one worker, with one thread and the embedded model."""
    return ServeConfig(
        model=embedded(), memory=memory, max_running=max_running, threads=1, log_format="text", healing="off"
    )


@dataclass(frozen=True)
class Workers:
    """Running workers, and the keys of their routers."""

    config: ServeConfig
    keys: RouterKeys
    contacts: Sequence[Contact]

    @contextmanager
    def routers(self, count: int = 1, rule: str = "least_cost") -> Iterator[list[Router]]:
        """Yield routers over all workers. On a busy machine they lose none, since nobody starts another."""
        with ExitStack() as stack:
            routers = [router_of(self.config, self.keys, rule) for _ in range(count)]
            for router in routers:
                router.links.heartbeat_timeout = PATIENCE
                router.start()
                stack.callback(router.stop)
                for n, contact in enumerate(self.contacts):
                    router.join(f"w{n}", contact)
            for router in routers:
                assert router.wait_for(len(self.contacts), PATIENCE), "workers are missing"
            yield routers


@contextmanager
def workers(count: int, config: ServeConfig, token_seconds: float | None) -> Iterator[Workers]:
    """Yield workers, which compute, or sleep so long for a token."""
    keys, spawn = RouterKeys.new(), multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pipes = []
        for _ in range(count):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(config, keys.for_workers, token_seconds, theirs), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join, PATIENCE)
            stack.callback(ours.close)
            pipes.append(ours)
        yield Workers(config, keys, [pipe.recv() for pipe in pipes])


def _serve(config: ServeConfig, keys: WorkerKeys, token_seconds: float | None, pipe: Connection) -> None:
    """Run one worker (a process of its own) until the other end of the pipe is closed."""
    host = Host(config, keys, lambda: "127.0.0.1", share_weights=False)
    if token_seconds is not None:
        _emulate(host._engine, token_seconds)
    pipe.send(host.contact())
    try:
        pipe.recv()
    except EOFError:
        host.stop()


def _emulate(engine: Engine, token_seconds: float) -> None:
    """Let an engine compute nothing, and sleep for the time of a step's tokens. Its answers are token 0."""

    def run(step: Step) -> torch.Tensor:
        time.sleep(token_seconds * (sum(leg.plan.computed_tokens for leg in step.legs) + len(step.decodes)))
        return torch.zeros(sum(item.wants_token for item in step.items), engine.spec.vocab_size)

    engine.runner.run = run  # type: ignore[method-assign]
