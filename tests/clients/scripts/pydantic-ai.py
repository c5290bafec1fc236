# /// script
# dependencies = ["pydantic-ai-slim[openai]==2.68.0"]
# [tool.headwater]
# shows = ["reply", "stream", "usage", "cached", "tools", "structured", "error"]
# ///
"""Pydantic AI: an agent's turns, streams, tools, and answers as models by a tool and by a schema; Responses."""

import asyncio
import json
import os
from pathlib import Path

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

task = json.loads(Path(os.environ["TASK"]).read_text())
provider = OpenAIProvider(base_url=os.environ["BASE_URL"] + "/v1", api_key="none")
model = OpenAIChatModel(os.environ["MODEL"], provider=provider)
settings = {"temperature": 0, "max_tokens": 200}
plain = Agent(model, instructions=task["system"], model_settings=settings, retries=0)
calls = []


class Clock(BaseModel, extra="forbid"):
    """A clock."""

    number: str = Field(max_length=12)
    crowns: int = Field(ge=0, le=9999)


def count_boats(town: str, number: int) -> str:
    """Count the boats."""
    calls.append({"name": "count_boats", "arguments": {"town": town, "number": number}})
    return task["result"]


async def streamed():
    async with plain.run_stream(task["questions"][0]) as run:
        pieces = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]
        return {"pieces": pieces, "whole": (await plain.run(task["questions"][0])).output}


async def second_turn(first):
    run = await plain.run(task["questions"][1], message_history=first.all_messages())
    usage = run.usage() if callable(run.usage) else run.usage
    return {"prompt": usage.input_tokens, "cached": usage.cache_read_tokens, "output": usage.output_tokens}


async def tool_call():
    agent = Agent(model, model_settings=settings, tools=[count_boats])
    run = await agent.run(task["order"])
    return {"calls": calls, "answer": run.output}


async def clock(kind):
    """Return a clock that was read as `kind`: as the arguments of a tool, or as an answer of a schema."""
    agent = Agent(model, output_type=kind, instructions=task["system"], model_settings=settings)
    return (await agent.run(task["questions"][1])).output


async def refused():
    try:
        await plain.run(task["questions"][0], model_settings={"temperature": 3})
    except ModelHTTPError as error:
        return {"type": type(error).__name__, "message": str(error)}


async def main():
    first = await plain.run(task["questions"][0])
    same = await plain.run(task["questions"][0], model=OpenAIResponsesModel(os.environ["MODEL"], provider=provider))
    assert same.output == first.output, same.output
    clocks = [await clock(kind) for kind in (Clock, NativeOutput(Clock))]
    seen = {
        "reply": first.output,
        "stream": await streamed(),
        "usage": await second_turn(first),
        "tools": await tool_call(),
        "structured": clocks[-1].model_dump(),
        "error": await refused(),
    }
    print(json.dumps(seen))


asyncio.run(main())
