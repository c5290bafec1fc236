"""BurstGPT's traces: times and lengths of requests to ChatGPT and GPT-4, and their sessions in later releases."""

from __future__ import annotations

from collections.abc import Mapping

from headwater.traces.lengths import LengthRows, Point


class BurstGpt(LengthRows):
    """A CSV with Timestamp (seconds), Model, Request tokens, Response tokens, Total tokens, Log Type.

    Releases since 2.0 have a `Session ID` and the elapsed time, too. Failed requests have 0 response tokens.
    Source: github.com/HPMLL/BurstGPT (CC BY 4.0; Wang et al. 2025).
    Inferred: a session's next prompt contains the one before and its answer if it is long enough for both.
    """

    about = "a CSV of times and lengths, sessions since 2.0"
    fields = ("Timestamp", "Model", "Request tokens", "Response tokens")
    head = b"Timestamp,"

    @staticmethod
    def point(row: Mapping[str, str]) -> Point:
        lengths = int(float(row["Request tokens"])), int(float(row["Response tokens"]))
        return Point(float(row["Timestamp"]), *lengths, row.get("Session ID") or "")
