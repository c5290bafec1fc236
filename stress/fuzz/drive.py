"""One target under atheris, in a process of its own: python -m stress.fuzz.drive TARGET [libFuzzer's options].

atheris is imported when a target runs, so that `--help` works without it.
"""

from __future__ import annotations

import argparse
import logging


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz one target, or run it on files that crashed it.")
    parser.add_argument("target", help="name in stress/fuzz/targets.py; what follows is libFuzzer's: options and files")
    given, options = parser.parse_known_args()
    import atheris

    with atheris.instrument_imports(include=["headwater"]):
        from stress.fuzz.targets import TARGETS
    logging.getLogger("headwater").setLevel(logging.CRITICAL)
    atheris.Setup([given.target, *options], TARGETS[given.target].run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
