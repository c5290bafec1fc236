"""Settings of the test process, which must be made before torch computes.

Triton's kernels run in its interpreter, which must be chosen before anything imports Triton. Worker threads sleep
while they wait: test processes that share cores would otherwise take them from each other. Proofs of exactness are
kept in a folder of this run and of the processes that it starts: none is taken over from elsewhere, and each is made
once. Kernels are compiled once for all of them. hypothesis counts no seconds: none of an example, and none of drawing
one. Objects that live as long as the process, of imported modules and collected tests, are not visited by the garbage
collector, and it runs less often: numba makes and keeps some hundred thousand objects of what it compiles. Clients
share a TLS context: httpx reads all certificates of authorities for each, 57 ms of processor time a look at /health.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is imported
os.environ.pop("COLUMNS", None)  # a console that is made while it is set keeps that width

from tests.processors import compiled_kernels

os.environ.setdefault("NUMBA_CACHE_DIR", compiled_kernels())  # before numba is imported

import atexit
import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import httpx._transports.default as httpx_default
import pytest
from hypothesis import HealthCheck, settings

import headwater.cli.common  # noqa: F401  # its console is made before a test sets COLUMNS
from headwater.engine.proof import verdict
from headwater.mixers import gpu, numerics
from headwater.mixers.numerics import Numerics, prepare_process
from tests import checkpoints, covering, interpreter, processors
from tests.exactness.loading import load, load_apart, loaded, make, same_bits_as_without_a_cache  # noqa: F401  # fixtures
from tests.seconds import pytest_runtest_makereport, pytest_terminal_summary  # noqa: F401  # hooks
from tests.support import examples

TESTS = Path(__file__).parent
TOOLS = ("benchmarks", "papers", "stress", "training")  # folders of tests, named after those of the tools

os.environ.setdefault("TRITON_INTERPRET", "1")  # 0: `make test-card`
if "PYTEST_XDIST_WORKER" not in os.environ:  # its folder is that of the process that distributes the tests
    os.environ["HEADWATER_CACHE_DIR"] = tempfile.mkdtemp(prefix="headwater-tests-")
    atexit.register(shutil.rmtree, os.environ["HEADWATER_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("HEADWATER_TEST_CHECKPOINTS", os.path.join(os.environ["HEADWATER_CACHE_DIR"], "checkpoints"))
verdict.MAX_VERDICT_FILES = 1000  # the models of a run are more than a user's
prepare_process(3)  # the most that a test uses: numba starts no more later
prepare_process(2)
settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=examples(100)
)
settings.load_profile("untimed")
gc.set_threshold(50000, 20, 100)
httpx_default.create_ssl_context = cache(httpx_default.create_ssl_context)


@pytest.fixture(scope="session")
def checkpoint() -> Callable[[str], Path]:
    """Folder of a named recipe's checkpoint, the same in all processes of a run."""
    return checkpoints.of_run


@pytest.fixture(scope="module", autouse=True)
def unchanged_checkpoints() -> Iterator[None]:
    """Fails after a file of tests that changed a checkpoint of the run: it would change the tests that follow."""
    yield
    changed = checkpoints.changed_in_run()
    assert not changed, f"a test changed checkpoints that all tests share: {', '.join(changed)}"


@pytest.fixture
def gpu_path(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Chooses the GPU's path for tensors on the CPU, in Triton's interpreter, or the CPU's.

    Products are torch's there, which a CPU computes exactly in tiles only.
    """

    def choose(chosen: bool) -> None:
        monkeypatch.setattr(gpu, "DEVICES", ("cpu",) if chosen else ())
        monkeypatch.setattr(numerics, "_current", Numerics("tiled" if chosen else "compiled"))

    return choose


@pytest.fixture
def wide_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of more columns, which change no bit of a row: the interpreter takes time for each program."""
    from headwater.mixers.gpu import pointwise  # needs Triton, as does the next
    from headwater.mixers.gpu.product import ProductOnGpu

    def outputs(product: ProductOnGpu) -> int:
        return max(16, min(128, 1 << (product.weight_NK.shape[0] - 1).bit_length()))

    monkeypatch.setattr(pointwise, "BLOCK", 8 * pointwise.BLOCK)
    monkeypatch.setattr(ProductOnGpu, "outputs", property(outputs))


@pytest.fixture
def exact_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers are multiplied as their values, by torch; kernels round the rows that they multiply them by."""
    monkeypatch.setattr(numerics, "_current", Numerics("plain"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of tests of tools if `make test` has none of them: what they import takes seconds."""
    if "not full" not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    is_tool = collection_path.relative_to(TESTS).parts[0] in TOOLS
    return True if is_tool and "mark.quick" not in collection_path.read_text(encoding="utf-8") else None


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to `make test-full` the tests of tools, which are no part of the package, and cells that no pair needs."""
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in TOOLS and not item.get_closest_marker("quick"):
            item.add_marker(pytest.mark.full)
    covering.leave_to_full(items)


def pytest_collection_finish() -> None:
    """Leave what is there out of garbage collection; Triton is imported by now, if a test needs it."""
    interpreter.prepare()
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    """Report the processors on which the exactness matrix runs here, and the others."""
    had = processors.had()
    missing = [name for name in processors.ENVIRONMENTS if name not in had]
    return f"processors: {', '.join(had)}; not had, so not run: {', '.join(missing) or 'none'}"
