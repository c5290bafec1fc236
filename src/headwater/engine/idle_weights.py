"""Weights of an engine that leave memory while it is idle, and are read again for the next request.

Its cache stays. So the model that is read again must compute the same bits: its files have the digest that they had,
and a fixed prompt gives the bits that it gave at the start.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from headwater.config import ServeConfig
from headwater.engine.proof.fingerprint import probe
from headwater.engine.runner import Runner
from headwater.errors import CheckpointError, ModelUnavailable
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics
from headwater.models.digest import weights_digest
from headwater.models.load import LoadedModel, Texts, load_model

InTurn = Callable[[Callable[[], None]], None]

LOADING = threading.Lock()  # numerics of weights that are laid out are the process's

log = logging.getLogger("headwater.engine")


class Weights:
    """Weights that stay in memory."""

    unload_after: float | None = None  # seconds without work
    loaded = True

    def release(self) -> None:
        """Give the memory back."""

    def load(self, in_turn: InTurn) -> None:
        """Read the weights again; `in_turn` runs what computes. Raises ModelUnavailable."""


class IdleWeights(Weights):
    """Weights that leave memory after `unload_after` seconds without work. For the engine's thread."""

    def __init__(self, loaded: LoadedModel, runner: Runner, config: ServeConfig, mode: str) -> None:
        """`mode`: of the numerics with which the model was loaded."""
        self.unload_after = config.unload_after
        self._runner, self._config, self._mode = runner, config, mode
        self._name, self._path, self._dtype = loaded.name, loaded.path, loaded.spec.dtype_name
        self._texts = Texts(loaded.tokenizer, loaded.chat_template, loaded.special_tokens, loaded.generation)
        self._digest, self._bits = weights_digest(self._path), probe(loaded).digest

    def release(self) -> None:
        self._runner.drop_model()
        self.loaded = False
        gc.collect()  # layers and recorded steps refer to each other
        with suppress(AttributeError):  # of GNU's C library
            ctypes.CDLL(None).malloc_trim(0)
        log.info(
            "%s: weights are unloaded after %g s without a request, the cache stays", self._name, self.unload_after
        )

    def load(self, in_turn: InTurn) -> None:
        began = time.perf_counter()
        try:
            with LOADING, numerics.using(Numerics(self._mode)):
                loaded = self._read()
                in_turn(lambda: self._check(loaded))
                self._runner.use_model(loaded.model)
        except (CheckpointError, OSError, MemoryError) as error:
            raise ModelUnavailable(f"model {self._name!r} cannot be loaded again: {error}") from error
        self.loaded = True
        log.info("%s: weights are loaded again, in %.1f s", self._name, time.perf_counter() - began)

    def _read(self) -> LoadedModel:
        config = self._config
        if weights_digest(self._path) != self._digest:
            raise CheckpointError(f"{self._path}: files have changed since the server started, start it again")
        held = self._dtype, config.device, config.page_size, config.weights
        return load_model(self._path, *held, False, self._texts, config.rope_scaling, config.keep_weights)

    def _check(self, loaded: LoadedModel) -> None:
        if probe(loaded).digest != self._bits:
            raise CheckpointError(f"{self._path}: a fixed prompt gives other bits than at the start, start it again")
