"""Generators of pages: settings, measurements, numbers in prose. Part of a clone, not of the wheel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pages import columns, files, formats, goals, measurements, numbers, settings

ROOT = Path(__file__).parents[1]
PAGES: dict[str, Callable[[], str]] = {
    "docs/settings.md": settings.page,
    "docs/files.md": files.page,
    "docs/formats.md": formats.page,
    "docs/columns.md": columns.page,
    "benchmarks/README.md": goals.page,
    **measurements.pages(),
    **dict(numbers.pages()),
}
