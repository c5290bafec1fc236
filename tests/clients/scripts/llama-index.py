# /// script
# dependencies = ["llama-index-llms-openai-like==0.8.1"]
# [tool.headwater]
# shows = ["reply", "stream", "usage", "cached", "tools", "structured", "error"]
# ///
"""LlamaIndex's model for servers like OpenAI's: chats, their streams, tools, and structured answers."""

import json
import os
from pathlib import Path

import openai
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

task = json.loads(Path(os.environ["TASK"]).read_text())
server = {
    "model": os.environ["MODEL"],
    "api_base": os.environ["BASE_URL"] + "/v1",
    "api_key": "none",
    "is_chat_model": True,
    "is_function_calling_model": True,
    "context_window": 32768,
    "max_retries": 0,
}
model = OpenAILike(temperature=0, max_tokens=200, **server)
system = ChatMessage(role="system", content=task["system"])
user = ChatMessage(role="user", content=task["questions"][0])


class Clock(BaseModel, extra="forbid"):
    """A clock."""

    number: str = Field(max_length=12)
    crowns: int = Field(ge=0, le=9999)


def count_boats(town: str, number: int) -> str:
    """Count the boats."""
    return task["result"]


def second_turn(message):
    usage = model.chat([system, user, message, ChatMessage(role="user", content=task["questions"][1])]).raw.usage
    cached = usage.prompt_tokens_details.cached_tokens
    return {"prompt": usage.prompt_tokens, "cached": cached, "output": usage.completion_tokens}


def tool_call():
    tool = FunctionTool.from_defaults(count_boats)
    order = ChatMessage(role="user", content=task["order"])
    response = model.chat_with_tools([tool], chat_history=[order], tool_required=True)
    chosen = model.get_tool_calls_from_response(response)
    calls = [{"name": call.tool_name, "arguments": call.tool_kwargs} for call in chosen]
    results = [
        ChatMessage(role="tool", content=str(tool(**c.tool_kwargs)), additional_kwargs={"tool_call_id": c.tool_id})
        for c in chosen
    ]
    answer = model.chat_with_tools([tool], chat_history=[order, response.message, *results]).message.content
    return {"calls": calls, "answer": answer or ""}


def structured():
    messages = [system, ChatMessage(role="user", content=task["questions"][1])]
    return model.as_structured_llm(Clock).chat(messages).raw.model_dump()


def refused():
    try:
        OpenAILike(additional_kwargs={"temperature": 3}, **server).chat([user])
    except openai.BadRequestError as error:
        return {"type": type(error).__name__, "message": str(error)}


first = model.chat([system, user]).message
seen = {
    "reply": first.content,
    "stream": {
        "pieces": [part.delta for part in model.stream_chat([system, user]) if part.delta],
        "whole": first.content,
    },
    "usage": second_turn(first),
    "tools": tool_call(),
    "structured": structured(),
    "error": refused(),
}
print(json.dumps(seen))
