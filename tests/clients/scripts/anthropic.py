# /// script
# dependencies = ["anthropic==2.12.0"]
# [tool.headwater]
# shows = ["models", "reply", "stream", "usage", "cached", "tools", "counted", "error"]
# ///
"""Anthropic's Python client: messages, their streams, tools, counts of tokens."""

import json
import os
from pathlib import Path

import anthropic

task = json.loads(Path(os.environ["TASK"]).read_text())
client = anthropic.Anthropic(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
common = {"model": os.environ["MODEL"], "max_tokens": task["max_tokens"]}
greedy = {"extra_body": {"temperature": 0}}
system = [{"type": "text", "text": task["system"], "cache_control": {"type": "ephemeral"}}]
user = {"role": "user", "content": task["questions"][0]}


def prompt_tokens(usage):
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def streamed():
    with client.messages.stream(system=system, messages=[user], **common, **greedy) as events:
        return {"pieces": list(events.text_stream), "whole": events.get_final_message().content[0].text}


def second_turn(message):
    turns = [user, {"role": "assistant", "content": message.content}, {"role": "user", "content": task["questions"][1]}]
    usage = client.messages.create(system=system, messages=turns, **common, **greedy).usage
    cached = usage.cache_read_input_tokens
    return {"prompt": prompt_tokens(usage), "cached": cached, "output": usage.output_tokens}


def tool_call():
    tool = {key: task["tool"][key] for key in ("name", "description")} | {"input_schema": task["tool"]["parameters"]}
    order = {"role": "user", "content": task["order"]}
    message = client.messages.create(messages=[order], tools=[tool], tool_choice={"type": "any"}, **common, **greedy)
    uses = [block for block in message.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": task["result"]} for use in uses]
    turns = [order, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    answer = client.messages.create(messages=turns, tools=[tool], **common, **greedy)
    texts = [block.text for block in answer.content if block.type == "text"]
    return {"calls": [{"name": use.name, "arguments": use.input} for use in uses], "answer": "".join(texts)}


def refused():
    try:
        client.messages.create(messages=[user], extra_body={"temperature": 3}, **common)
    except anthropic.BadRequestError as error:
        return {"type": type(error).__name__, "message": str(error)}


first = client.messages.create(system=system, messages=[user], **common, **greedy)
counted = client.messages.count_tokens(model=common["model"], system=system, messages=[user])
seen = {
    "models": [model.id for model in client.models.list()],
    "reply": first.content[0].text,
    "stream": streamed(),
    "usage": second_turn(first),
    "tools": tool_call(),
    "counted": {"counted": counted.input_tokens, "prompt": prompt_tokens(first.usage)},
    "error": refused(),
}
print(json.dumps(seen))
