"""Kernels are compiled as a whole: what they call is linked into them, and becomes no machine code of its own."""

import gc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("numba", reason="numba is not installed")

from numba import prange
from numba.core import event
from numba.core.caching import NullCache
from numba.core.codegen import CPUCodeLibrary, JITCPUCodegen

from headwater.kernels import compiling
from headwater.kernels.linking import GC_THRESHOLDS


def squares_by(compiled: ModuleType) -> Callable[[np.ndarray], np.ndarray]:
    """Compile a kernel with a part and a loop over threads; what it returns is 2x² + 1."""

    @compiled.part
    def twice_square(x):
        return x * x * np.float32(2)

    @compiled.kernel
    def squares_into(x, y):
        for i in prange(len(x)):
            y[i] = twice_square(x[i]) + np.float32(1)

    squares_into.compiled._cache = NullCache()

    def squares(x: np.ndarray) -> np.ndarray:
        y = np.empty_like(x)
        squares_into(x, y)
        return y

    return squares


def another(name: str) -> ModuleType:
    """Load `compiling` again, under another name."""
    spec = importlib.util.spec_from_file_location(name, compiling.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def machine_code(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of modules that became machine code."""
    names, add = [], JITCPUCodegen._add_module
    monkeypatch.setattr(JITCPUCodegen, "_add_module", lambda self, of: names.append(of.name) or add(self, of))
    return names


X = np.linspace(-3, 3, 1000, dtype=np.float32)
INNER = ("twice_square", "parfor", "gufunc")


def test_only_a_kernel_becomes_machine_code(machine_code: list[str]) -> None:
    assert np.array_equal(squares_by(compiling)(X), X * X * 2 + 1)
    assert any("squares_into" in name for name in machine_code)
    assert not [name for name in machine_code if any(inner in name for inner in INNER)]


def test_a_numba_that_has_not_the_methods_compiles_each_function_by_itself(
    monkeypatch: pytest.MonkeyPatch, machine_code: list[str]
) -> None:
    with monkeypatch.context() as without:
        without.delattr(CPUCodeLibrary, "_optimize_final_module")
        without.delitem(sys.modules, "headwater.kernels.linking")
        alone = another("compiling_by_numba_itself")
    assert np.array_equal(squares_by(alone)(X), squares_by(compiling)(X))
    assert all(any(inner in name for name in machine_code) for inner in INNER)


def test_garbage_is_collected_less_often_only_while_a_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, listener = [], event.RecordingListener()
    monkeypatch.setattr(listener, "on_end", lambda of: seen.append(gc.get_threshold()))
    before = gc.get_threshold()
    gc.set_threshold(600, 9, 9)
    try:
        with event.install_listener("numba:compile", listener):
            squares_by(compiling)(X)
        assert gc.get_threshold() == (600, 9, 9)
    finally:
        gc.set_threshold(*before)
    assert seen == [GC_THRESHOLDS, (600, 9, 9)]  # after the part, and after the kernel
