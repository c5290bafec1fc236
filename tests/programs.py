"""Programs of a few lines, each in a process of its own that is forked from one with torch, and nothing else of ours.

So it has the environment that it is given when it imports numba and headwater, without the seconds of importing torch.
What torch's own libraries read when they are loaded is not for it: such a test starts an interpreter.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTPUTS = {"out": 1, "err": 2}


def run(program: str, *arguments: str, without: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with the variables of this process but one, and with more. Several may run at once."""
    environment = {name: value for name, value in os.environ.items() if name != without} | variables
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        os.mkfifo(Path(folder, "code"))
        asked = {"program": program, "arguments": arguments, "environment": environment, "folder": folder}
        os.write(_parent().stdin.fileno(), json.dumps(asked).encode() + b"\n")
        code = int(Path(folder, "code").read_text())  # waits until it is written
        out, err = (Path(folder, name).read_text() for name in OUTPUTS)
    return subprocess.CompletedProcess([program, *arguments], code, out, err)


@cache
def _parent() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "import torch; from tests import programs; programs._serve()"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)
    atexit.register(process.kill)
    return process


def _serve() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the forked processes
    for line in sys.stdin:
        if not os.fork():
            _run(**json.loads(line))


def _run(program: str, arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Run the program in a child, and write its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        Path(folder, "code").write_text(str(code))
        os._exit(0)
    os.environ.clear()
    os.environ.update(environment)
    for name, number in OUTPUTS.items():
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["-c", *arguments]
    code = 0
    try:
        exec(program, {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
