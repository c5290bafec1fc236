"""Processor seconds of a test run by folder and test, child processes included.

A test's seconds begin where those of the test before in its process end, so what a fixture takes that several tests
share counts for the first of them. A child process counts when it has ended and was waited for.
"""

import os
from collections import Counter
from collections.abc import Generator
from pathlib import PurePath
from typing import Any

import pytest

SLOWEST_TESTS = 25
PROPERTY = "processor_seconds"

_last = sum(os.times()[:4])


def spent() -> float:
    """Return the processor seconds of this process and its ended children since the last call."""
    global _last
    before, _last = _last, sum(os.times()[:4])
    return _last - before


def folder(nodeid: str) -> str:
    """Return the folder of a test below `tests`, or its file at the top."""
    parts = PurePath(nodeid.partition("::")[0]).parts
    return "/".join(parts[:2]) if len(parts) > 2 else "tests"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Append the phase's seconds to its report, which the process that distributes the tests receives."""
    report = yield
    report.user_properties = [*report.user_properties, (PROPERTY, spent())]
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a row for each folder, and the tests that took the most, if several processes ran them."""
    if not terminalreporter.config.getoption("numprocesses", None):
        return
    folders: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, seconds in getattr(report, "user_properties", ()):
                if name == PROPERTY:
                    folders[folder(report.nodeid)] += seconds
                    tests[report.nodeid] += seconds
    terminalreporter.section("processor seconds")
    for counted in (folders.most_common(), tests.most_common(SLOWEST_TESTS)):
        for name, seconds in counted:
            terminalreporter.write_line(f"{seconds:8.1f}  {name}")
    terminalreporter.write_line(f"{sum(folders.values()):8.1f}  all")
