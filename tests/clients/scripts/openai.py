# /// script
# dependencies = ["openai==3.54.0"]
# [tool.headwater]
# shows = ["models", "reply", "stream", "usage", "cached", "tools", "structured", "responses", "error"]
# ///
"""OpenAI's Python client: chat completions, their streams, tools and parsed answers, and the Responses API."""

import json
import os
from pathlib import Path

import openai
from pydantic import BaseModel, Field

task = json.loads(Path(os.environ["TASK"]).read_text())
client = openai.OpenAI(base_url=os.environ["BASE_URL"] + "/v1", api_key="none", max_retries=0)
model = os.environ["MODEL"]
greedy = {"model": model, "temperature": 0}
system = {"role": "system", "content": task["system"]}
user = {"role": "user", "content": task["questions"][0]}


class Clock(BaseModel, extra="forbid"):
    """A clock."""

    number: str = Field(max_length=12)
    crowns: int = Field(ge=0, le=9999)


def chat(messages, **more):
    return client.chat.completions.create(messages=messages, max_tokens=task["max_tokens"], **greedy, **more)


def streamed():
    with client.chat.completions.stream(messages=[system, user], max_tokens=task["max_tokens"], **greedy) as events:
        pieces = [event.delta for event in events if event.type == "content.delta"]
        return {"pieces": pieces, "whole": events.get_final_completion().choices[0].message.content}


def second_turn(message):
    usage = chat([system, user, message, {"role": "user", "content": task["questions"][1]}]).usage
    cached = usage.prompt_tokens_details.cached_tokens
    return {"prompt": usage.prompt_tokens, "cached": cached, "output": usage.completion_tokens}


def tool_call():
    tools = [{"type": "function", "function": task["tool"]}]
    order = {"role": "user", "content": task["order"]}
    message = chat([order], tools=tools, tool_choice="required").choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": task["result"]} for call in message.tool_calls]
    answer = chat([order, message, *results], tools=tools).choices[0].message.content
    calls = [{"name": c.function.name, "arguments": json.loads(c.function.arguments)} for c in message.tool_calls]
    return {"calls": calls, "answer": answer or ""}


def parsed():
    ask = {"messages": [system, {"role": "user", "content": task["questions"][1]}], "max_tokens": 200}
    return client.chat.completions.parse(response_format=Clock, **ask, **greedy).choices[0].message.parsed.model_dump()


def responded():
    ask = {"instructions": task["system"], "input": task["questions"][0], **greedy}
    with client.responses.stream(**ask) as events:
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
        return {"pieces": pieces, "whole": events.get_final_response().output_text}


def refused():
    try:
        client.chat.completions.create(model=model, messages=[user], temperature=3)
    except openai.BadRequestError as error:
        return {"type": type(error).__name__, "message": str(error)}


first = chat([system, user]).choices[0].message
seen = {
    "models": [model.id for model in client.models.list()],
    "reply": first.content,
    "stream": streamed(),
    "usage": second_turn(first),
    "tools": tool_call(),
    "structured": parsed(),
    "responses": responded(),
    "error": refused(),
}
print(json.dumps(seen))
