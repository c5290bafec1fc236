"""Azure's traces of LLM inference, 2023 and 2024: times and lengths."""

from __future__ import annotations

from collections.abc import Mapping

from headwater.traces.lengths import LengthRows, Point
from headwater.traces.reader import instant


class Azure(LengthRows):
    """A CSV with TIMESTAMP, ContextTokens, GeneratedTokens.

    Times of 2023 have seven digits of a second and no zone, those of 2024 a zone and any number of digits, or none.
    Source: github.com/Azure/AzurePublicDataset (AzureLLMInferenceDataset2023.md, AzureLLMInferenceDataset2024.md).
    Inferred: a time without a zone is UTC; no request shares text with another one.
    """

    about = "LLM inference 2023, 2024: a CSV of times and lengths"
    fields = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    head = b"TIMESTAMP,"

    @staticmethod
    def point(row: Mapping[str, str]) -> Point:
        return Point(instant(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
