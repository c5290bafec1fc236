"""Documents that come beside a conversation: each is a segment of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from headwater.server.prompt.marks import as_segment


class Document(BaseModel):
    """As chat templates take them; a template may read more of it than is named here."""

    model_config = ConfigDict(extra="allow", strict=True)

    text: str = Field(min_length=1)
    title: str | None = None

    @property
    def sent(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


def for_template(documents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a template that shows documents its own way: their texts are the segments."""
    return [{**document, "text": as_segment(document["text"])} for document in documents]


def before(content: str, documents: Sequence[dict[str, Any]]) -> str:
    """A message's content with documents in front of it, in plain words; titles belong to the segments."""
    return "".join(as_segment(f"{_heading(document)}{document['text']}\n\n") for document in documents) + content


def _heading(document: dict[str, Any]) -> str:
    title = document.get("title")
    return f"{title}\n" if title else ""
