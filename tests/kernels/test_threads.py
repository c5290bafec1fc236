"""Threads of kernels: two callers at once, and machines where numba lacks what they need."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from headwater import kernels

pytest.importorskip("numba", reason="numba is not installed")

from headwater.kernels.compiling import threads_in_use, use_threads
from headwater.mixers.linear import Linear
from headwater.mixers.numerics import Numerics
from tests import programs


def test_two_callers_at_once_get_their_own_results():
    """As two engines in one process, or a server and a doctor."""
    linear, inputs = Linear(torch.randn(300, 192), numerics=Numerics("compiled")), torch.randn(2, 40, 192)
    wanted = [linear(x_RK, 0) for x_RK in inputs]
    same: list[list[bool]] = [[], []]

    def call(at: int) -> None:
        use_threads(2)
        for _ in range(200):
            same[at].append(torch.equal(linear(inputs[at], 0), wanted[at]))

    callers = [threading.Thread(target=call, args=(at,)) for at in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert same == [[True] * 200] * 2


WORKERS = """
import os, sys, time
if sys.argv[1] == "torch first":
    import torch
import headwater
import torch
from headwater.mixers.linear import Linear
from headwater.mixers.numerics import Numerics, end_workers, prepare_process

prepare_process(2)
linear, x_RK = Linear(torch.ones(256, 64), numerics=Numerics("compiled")), torch.ones(3, 64)
y_RN = linear(x_RK, 0)
before = len(os.listdir("/proc/self/task"))
end_workers()
for _ in range(500):  # a thread that ended may stay in the list for a while
    ended = before - len(os.listdir("/proc/self/task"))
    if ended or sys.argv[1] == "torch first":
        break
    time.sleep(0.01)
assert torch.equal(linear(x_RK, 0), y_RN)
print(ended, len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor has no workers")
@pytest.mark.parametrize(("first", "ended"), [("headwater first", 1), ("torch first", 0)])
def test_workers_of_a_thread_end_if_others_do_not_spin_for_long(first, ended):
    """Only if it is headwater that chose how long they spin: before torch was imported."""
    chosen = ("GOMP_SPINCOUNT", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in chosen}
    run = [sys.executable, "-c", WORKERS, first]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split() == [str(ended), "0"], done.stderr


def test_a_caller_has_its_own_number_of_threads():
    before, seen = threads_in_use(), []

    def call() -> None:
        use_threads(1)
        seen.append(threads_in_use())

    caller = threading.Thread(target=call)
    caller.start()
    caller.join(60)
    assert (seen, threads_in_use()) == ([1], before)


def test_kernels_are_unavailable_without_openmp_threads(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "numba.np.ufunc.omppool", None)
    kernels.available.cache_clear()
    assert not kernels.available()
    kernels.available.cache_clear()
    (line,) = caplog.messages
    assert line.startswith("torch computes everything, because numba or its OpenMP threads are missing: ")


DENORMALS = """
import sys, torch
from headwater.mixers.linear import Linear
from headwater.mixers.numerics import Numerics, prepare_process
prepare_process(3)
torch.set_flush_denormal(sys.argv[1] == "flushed")
half_NK, x_RK = torch.full((4096, 8), 0.5), torch.zeros(64, 8)
x_RK[:, 0] = torch.finfo(torch.float32).tiny
y_RN = Linear(half_NK, numerics=Numerics("compiled"))(x_RK, 0)
print((y_RN.view(torch.int32) == 0).all().item())
"""


@pytest.mark.parametrize(("mode", "zeros"), [("flushed", "True"), ("kept", "False")])
def test_kernels_flush_denormals_on_every_thread(mode, zeros):
    """Half of the smallest normal number is a denormal: without the setting the results are not all zeros."""
    assert programs.run(DENORMALS, mode).stdout.split() == [zeros]


@pytest.mark.parametrize("n", [1, (os.cpu_count() or 1) + 1])
def test_torch_and_kernels_have_the_number_of_threads_that_was_asked_for(n):
    program = f"import torch; from headwater.mixers.numerics import prepare_process; prepare_process({n}); "
    shown = "from headwater.kernels.compiling import threads_in_use; print(torch.get_num_threads(), threads_in_use())"
    assert programs.run(program + shown, without="NUMBA_NUM_THREADS").stdout.split() == [str(n)] * 2
