"""Second process that compiles kernels during the self-check at the first start on a machine.

Numba compiles one kernel at a time in a process. The second process runs the checks of the self-check from the last to
the first, on one thread and without a model, and ignores their results: its compiled kernels are in the folder when the
self-check needs them.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from headwater import kernels
from headwater.mixers.numerics import prepare_process
from headwater.spec import ModelSpec

log = logging.getLogger("headwater.engine")


@contextmanager
def compiling_beside(spec: ModelSpec, device: str) -> Iterator[None]:
    """Have the second process compile while the block runs, if this is the first start; it ends with the block."""
    if not (torch.device(device).type == "cpu" and kernels.available() and _is_first_start()):
        yield
        return
    process = _started(spec)
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def _started(spec: ModelSpec) -> subprocess.Popen[bytes] | None:
    """Start the second process; None, with a line in the log, if that fails: the first one compiles all then."""
    none = subprocess.DEVNULL
    try:
        process = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=none, stderr=none)
    except OSError as error:
        log.info("kernels are compiled by one process, because no second one can be started: %s", error)
        return None
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:  # it may have ended at once
        process.stdin.write(pickle.dumps(spec))
    return process


def _is_first_start() -> bool:
    from headwater.kernels.compiling import none_kept  # needs numba

    return none_kept()


def main() -> None:
    """Compile what the specification on the standard input needs; stop when the process that asked for it is gone."""
    from headwater.engine.proof.selfcheck import last_checks_first

    parent = os.getppid()
    spec = pickle.load(sys.stdin.buffer)
    prepare_process(1)
    for _ in last_checks_first(spec):
        if os.getppid() != parent:
            return


if __name__ == "__main__":
    main()
