"""Blocks of Anthropic's contents: texts, documents, calls and their results, thoughts, and those that are not read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema

CacheControl = dict[str, Any]  # checked with the whole conversation
TEXT_OR_BLOCKS = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})


def as_blocks(content: Any) -> Any:
    """Return a text as a list of one block, and no content as an empty list."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


class Block(BaseModel, strict=True):
    """Block of a content. Fields that are not named here, such as signatures, are ignored."""

    cache_control: CacheControl | None = None


class ShownBlock(Block, ABC):
    """Block whose text is a part of a message's content."""

    segment: bool | None = None

    @abstractmethod
    def shown(self) -> str:
        """Return the text."""

    def part(self) -> dict[str, Any]:
        """Return the block as a part of a chat message."""
        given = {"type": "text", "text": self.shown(), "segment": self.segment, "cache_control": self.cache_control}
        return {name: value for name, value in given.items() if value is not None}


class TextBlock(ShownBlock):
    type: Literal["text"]
    text: str

    def shown(self) -> str:
        return self.text


Texts = Annotated[list[TextBlock], BeforeValidator(as_blocks), TEXT_OR_BLOCKS]


class TextSource(BaseModel, strict=True):
    type: Literal["text"]
    data: str


class ContentSource(BaseModel, strict=True):
    type: Literal["content"]
    content: Texts


class Citations(BaseModel, strict=True):
    enabled: Literal[False] | None = None  # answers cite nothing


class DocumentBlock(ShownBlock):
    type: Literal["document"]
    source: Annotated[TextSource | ContentSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None

    def shown(self) -> str:
        source = self.source
        return headed(
            source.data if isinstance(source, TextSource) else joined(source.content), self.title, self.context
        )


class SearchResultBlock(ShownBlock):
    type: Literal["search_result"]
    source: str
    title: str
    content: Texts
    citations: Citations | None = None

    def shown(self) -> str:
        return headed(joined(self.content), self.title, self.source)


class ToolReferenceBlock(ShownBlock):
    """Name of a tool that the client's search for tools has found. Templates show all tools already."""

    type: Literal["tool_reference"]
    tool_name: str

    def shown(self) -> str:
        return f"{self.tool_name}\n"


def joined(blocks: Sequence[ShownBlock]) -> str:
    return "".join(block.shown() for block in blocks)


def headed(text: str, *heads: str | None) -> str:
    """Return a document's text after lines with its title and the like, with an empty line at its end."""
    return "\n".join([*(head for head in heads if head), text]) + "\n\n"


class OtherBlock(Block):
    """Block that this model cannot read, such as an image. In a history a placeholder stands for it."""

    type: str

    def part(self) -> dict[str, Any]:
        """Return the block as a part of a chat message: only its type."""
        given = {"type": self.type, "cache_control": self.cache_control}
        return {name: value for name, value in given.items() if value is not None}


def kind_of(block: Any) -> Any:
    """Return the type of a block; "other" for types that are not read, and for documents that are not text."""
    if isinstance(block, Block):
        return block.type  # type: ignore[attr-defined]
    kind, source = (block.get("type"), block.get("source")) if isinstance(block, dict) else (block, None)
    if not isinstance(kind, str):
        return None
    if kind == "document" and isinstance(source, dict) and source.get("type") not in ("text", "content"):
        return "other"
    return kind if kind in READ_TYPES else "other"


Shown = (
    Annotated[TextBlock, Tag("text")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ToolReferenceBlock, Tag("tool_reference")]
    | Annotated[OtherBlock, Tag("other")]
)
ShownBlocks = Annotated[list[Annotated[Shown, Discriminator(kind_of)]], BeforeValidator(as_blocks), TEXT_OR_BLOCKS]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: ShownBlocks | None = None
    is_error: bool | None = None


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Block):
    """Reasoning that only its author can read. It is left out."""

    type: Literal["redacted_thinking"]


AnyBlock = (
    Shown
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
)
READ_TYPES = (
    *("text", "document", "search_result", "tool_reference"),
    *("tool_result", "tool_use", "thinking", "redacted_thinking"),
)


def parts(blocks: Sequence[AnyBlock]) -> list[dict[str, Any]]:
    """Return the blocks of a content, except calls and the like, as parts of a chat message."""
    return [block.part() for block in blocks if isinstance(block, ShownBlock | OtherBlock)]
