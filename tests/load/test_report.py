"""The bar on a terminal, and its silence elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from headwater.load.report import LiveProgress
from headwater.load.results import Result


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_bar_is_shown_only_on_a_terminal(terminal):
    out = io.StringIO()
    with LiveProgress(Console(file=out, force_terminal=terminal, width=150)) as progress:
        progress.phase("2x", 4)
        for number, outcome in enumerate(("ok", "ok", "refused")):
            tokens = {"prompt_tokens": 100, "cached_tokens": 75, "output_tokens": 8} if outcome == "ok" else {}
            progress.result(Result(number, "s", 0, "", outcome, 0.0, 0.0, 2.0, **tokens))
    shown = out.getvalue()
    assert ("2x" in shown and "3/4" in shown and "ok 2 refused 1, 8 tok/s, hits 75%" in shown) == terminal
    assert bool(shown) == terminal
