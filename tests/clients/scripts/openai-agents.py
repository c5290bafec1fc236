# /// script
# dependencies = ["openai-agents==0.24.0"]
# [tool.headwater]
# shows = ["tools", "usage", "stream", "cached", "error"]
# ///
"""OpenAI's Agents SDK, over chat completions and over the Responses API: a tool's call, a session's turns, a stream."""

import asyncio
import json
import os
from pathlib import Path

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

set_tracing_disabled(True)
task = json.loads(Path(os.environ["TASK"]).read_text())
client = openai.AsyncOpenAI(base_url=os.environ["BASE_URL"] + "/v1", api_key="none", max_retries=0)
chat = OpenAIChatCompletionsModel(os.environ["MODEL"], client)
responses = OpenAIResponsesModel(os.environ["MODEL"], client)
calls = []


@function_tool
def count_boats(town: str, number: int) -> str:
    """Count the boats."""
    calls.append({"name": "count_boats", "arguments": {"town": town, "number": number}})
    return task["result"]


def agent(model, tools=(), **settings):
    settings = ModelSettings(**{"temperature": 0, "max_tokens": task["max_tokens"], **settings})
    return Agent("boats", instructions=task["system"], model=model, tools=list(tools), model_settings=settings)


async def second_turn(model):
    first = await Runner.run(agent(model), task["questions"][0])
    turns = [*first.to_input_list(), {"role": "user", "content": task["questions"][1]}]
    usage = (await Runner.run(agent(model), turns)).context_wrapper.usage
    cached = usage.input_tokens_details.cached_tokens
    return {"prompt": usage.input_tokens, "cached": cached, "output": usage.output_tokens}


async def streamed(model):
    run = Runner.run_streamed(agent(model), task["questions"][0])
    pieces = [
        event.data.delta
        async for event in run.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    return {"pieces": pieces, "whole": run.final_output}


async def refused(model):
    try:
        await Runner.run(agent(model, temperature=3), task["order"])
    except openai.BadRequestError as error:
        return {"type": type(error).__name__, "message": str(error)}


async def main():
    for model in (chat, responses):
        order = await Runner.run(agent(model, [count_boats], tool_choice="required"), task["order"])
    usages = [await second_turn(model) for model in (chat, responses)]
    streams = [await streamed(model) for model in (chat, responses)]
    errors = [await refused(model) for model in (chat, responses)]
    assert len(calls) >= 2, calls
    assert all(usage["cached"] for usage in usages), usages
    seen = {"tools": {"calls": calls, "answer": order.final_output}}
    print(json.dumps({**seen, "usage": usages[-1], "stream": streams[-1], "error": errors[-1]}))


asyncio.run(main())
