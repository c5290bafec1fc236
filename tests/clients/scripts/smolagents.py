# /// script
# dependencies = ["smolagents[openai]==1.26.0"]
# [tool.headwater]
# shows = ["reply", "stream", "tools", "cached", "error"]
# ///
"""smolagents: its model for OpenAI's API, a stream, and an agent that calls tools."""

import json
import os
from pathlib import Path

import openai
from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage, MessageRole

task = json.loads(Path(os.environ["TASK"]).read_text())
server = {"model_id": os.environ["MODEL"], "api_base": os.environ["BASE_URL"] + "/v1", "api_key": "none"}
model = OpenAIServerModel(temperature=0, max_tokens=task["max_tokens"], client_kwargs={"max_retries": 0}, **server)
turn = [
    ChatMessage(role=MessageRole.SYSTEM, content=task["system"]),
    ChatMessage(role=MessageRole.USER, content=task["questions"][0]),
]
calls = []


@tool
def count_boats(town: str, number: int) -> str:
    """Count the boats.

    Args:
        town: Town.
        number: Number.
    """
    calls.append({"name": "count_boats", "arguments": {"town": town, "number": number}})
    return task["result"]


def refused():
    try:
        OpenAIServerModel(temperature=3, **server).generate(turn)
    except openai.BadRequestError as error:
        return {"type": type(error).__name__, "message": str(error)}


def agent_call():
    """Let the model call the tool, then run an agent for two steps, in each of which it must call a tool of its own."""
    order = [turn[0], ChatMessage(role=MessageRole.USER, content=task["order"])]
    (asked,) = model.generate(order, tools_to_call_from=[count_boats]).tool_calls
    answer = ToolCallingAgent(tools=[count_boats], model=model, max_steps=2, verbosity_level=0).run(task["order"])
    arguments = asked.function.arguments
    arguments = arguments if isinstance(arguments, dict) else json.loads(arguments)
    return {"calls": [{"name": asked.function.name, "arguments": arguments}, *calls], "answer": str(answer)}


reply = model.generate(turn).content
pieces = [delta.content for delta in model.generate_stream(turn) if delta.content]
seen = {
    "reply": reply,
    "stream": {"pieces": pieces, "whole": reply},
    "tools": agent_call(),
    "error": refused(),
}
print(json.dumps(seen))
