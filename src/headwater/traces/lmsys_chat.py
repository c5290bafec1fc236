"""LMSYS-Chat-1M and WildChat: conversations of many users with many models."""

from __future__ import annotations

from typing import Any

from headwater.traces.reader import has
from headwater.traces.sessions import ShareGpt


class LmsysChat(ShareGpt):
    """A conversation a row: `conversation` [{`role`, `content`}], and `conversation_id` or `conversation_hash`.

    Both are published in Parquet (extra `parquet`); JSON lines are read as well.
    Sources: huggingface.co/datasets/lmsys/lmsys-chat-1m, huggingface.co/datasets/allenai/WildChat-1M.
    Inferred: times are left out: WildChat's are those of answers, LMSYS-Chat has none.
    """

    about = "also WildChat: role and content, Parquet"
    fields = ("conversation_id", "conversation_hash", "model", "conversation", "language", "timestamp")
    turns = "conversation"

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, "conversation") and isinstance(first["conversation"], list)
