"""Engines of one process, one for each model: they start, drain and stop together, and compute in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from headwater.engine.engine import Engine
from headwater.engine.shares import Shares
from headwater.mixers.numerics import prepare_process


class Engines:
    """Engines of a process. Steps of several run on one thread, in the order in which they are planned.

    So the threads that compute a step are never more than one engine's, and kernels need not expect two callers.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        """The engines are not started yet."""
        self.all = tuple(engines)
        self._steps: ThreadPoolExecutor | None = None
        if len(self.all) > 1:
            threads = self.all[0].loop.compute_threads
            steps = self._steps = ThreadPoolExecutor(1, "headwater-steps", prepare_process, (threads,))
            for engine in self.all:
                engine.loop.in_turn = lambda step: steps.submit(step).result()
        self._shares = Shares(self.all) if any(engine.scheduler.cache.pool.n_lent for engine in self.all) else None

    def start(self) -> None:
        """Start serving."""
        for engine in self.all:
            engine.start()
        if self._shares is not None:
            self._shares.start()

    def refuse_new(self) -> None:
        """Refuse requests from now on, as `Engine.refuse_new` does."""
        for engine in self.all:
            engine.refuse_new()

    def stop(self, left: Callable[[], float] = lambda: 0.0) -> None:
        """Stop each engine, as `Engine.stop` does."""
        if self._shares is not None:
            self._shares.stop()
        for engine in self.all:
            engine.stop(left)
        if self._steps is not None:
            self._steps.shutdown()

    def turn_seconds(self) -> float:
        """Return the longest time since an engine's current step began."""
        return max(engine.turn_seconds() for engine in self.all)
