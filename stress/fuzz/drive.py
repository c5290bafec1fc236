"""One target under atheris, in a process of its own: python -m stress.fuzz.drive TARGET [libFuzzer's options]"""

from __future__ import annotations

import logging
import sys

import atheris

with atheris.instrument_imports(include=["headwater"]):
    from stress.fuzz.targets import TARGETS


def main() -> None:
    logging.getLogger("headwater").setLevel(logging.CRITICAL)
    name, *options = sys.argv[1:]
    atheris.Setup([name, *options], TARGETS[name].run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
