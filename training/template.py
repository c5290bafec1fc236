"""Examples as text: through the chat template that the model is served with."""

from __future__ import annotations

from datetime import datetime
from functools import cache
from pathlib import Path

from headwater.server.prompt.template import ChatTemplate
from training.tasks.example import TEXT, Example, Message, Tool

FILE = Path(__file__).with_name("chat_template.jinja")
NOW = datetime(2000, 1, 1)  # the template shows no time


@cache
def chat_template() -> ChatTemplate:
    return ChatTemplate(FILE.read_text("utf-8"))


def rendered(messages: list[Message], tools: list[Tool] | None = None, generate: bool = False) -> str:
    """`generate`: with the beginning of the assistant's next turn."""
    return str(chat_template().render(messages, NOW, {"tools": tools, "add_generation_prompt": generate}))


def example_text(example: Example) -> str:
    """A conversation with its markup, a text without."""
    if example.kind == TEXT:
        return str(example.messages[0]["content"])
    return rendered(example.messages, example.tools)
