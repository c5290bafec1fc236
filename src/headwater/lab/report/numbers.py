"""Formats of the report's numbers."""

from __future__ import annotations

BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
SHORT = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))


def count(value: float) -> str:
    """Format with thousands separators: 1234567 is 1,234,567."""
    return f"{value:,.0f}"


def short(value: float) -> str:
    """Format with three digits and a unit, for little room: 1234567 is 1.23M."""
    for size, unit in SHORT:
        if value >= size:
            scaled = value / (1e3 if unit == "k" else size)
            return f"{_trimmed(scaled, 2 if scaled < 10 else 1 if scaled < 100 else 0)}{unit}"
    return count(value)


def tokens(value: float) -> str:
    """Format a length in powers of two: 16384 is 16k."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "k")):
        if value >= size:
            return f"{_trimmed(value / size, 1)}{unit}"
    return count(value)


def size(value: float) -> str:
    """Format bytes: 43000000000 is 43 GB."""
    for unit_size, unit in BYTES:
        if value >= unit_size:
            return f"{_trimmed(value / unit_size, 2)} {unit}"
    return f"{value:.0f} B"


def percent(share: float, digits: int = 1) -> str:
    """Format a share: 0.8123 is 81.2%."""
    return f"{100 * share:.{digits}f}%"


def milliseconds(value: float) -> str:
    """Format milliseconds: 81.234 is 81.2 ms, 8123.4 is 8.12 s."""
    if value >= 1000:
        return f"{value / 1000:,.2f} s"
    return f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def duration(milliseconds: float) -> str:
    """Format milliseconds of an axis: 300 is 300 ms, 3000 is 3 s."""
    return f"{milliseconds:g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:g} s"


def _trimmed(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
