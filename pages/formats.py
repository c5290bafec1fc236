"""docs/formats.md, from the readers in `headwater.traces`."""

from __future__ import annotations

import inspect

from headwater.traces.read import READERS
from pages.markdown import table

HEAD = """\
# Formats of recorded traffic

Formats that `headwater replay` and `headwater size` read, generated from the readers' code by `make pages`. The
first record of a file shows its format; `headwater replay --formats` prints this list. [traces.md](traces.md) explains
how text becomes tokens, [data.md](data.md) where to get published recordings.
"""


def page() -> str:
    """Return the page: a table, and the facts of each format as its reader states them."""
    rows = [(f"[{name}](#{_anchor(name)})", reader.about) for name, reader in READERS.items()]
    parts = [f"## {name}\n\n{inspect.getdoc(reader)}\n" for name, reader in READERS.items()]
    return "\n".join([HEAD, table(("format", "contents"), rows) + "\n", *parts])


def _anchor(name: str) -> str:
    return "".join(letter for letter in name.lower().replace(" ", "-") if letter.isalnum() or letter == "-")
