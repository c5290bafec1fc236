# /// script
# dependencies = ["ollama==0.6.3"]
# [tool.headwater]
# shows = ["models", "reply", "stream", "cached", "tools", "structured", "error"]
# ///
"""Ollama's Python client: chats, their streams, tools, structured answers, the list of models."""

import json
import os
from pathlib import Path

import ollama

task = json.loads(Path(os.environ["TASK"]).read_text())
client = ollama.Client(host=os.environ["BASE_URL"])
model = os.environ["MODEL"]
greedy = {"temperature": 0, "num_predict": 200}
system = {"role": "system", "content": task["system"]}
user = {"role": "user", "content": task["questions"][0]}


def chat(messages, **more):
    return client.chat(model, messages=messages, **{"options": greedy, **more})


def tool_call():
    tools = [{"type": "function", "function": task["tool"]}]
    order = {"role": "user", "content": task["order"]}
    message = chat([order], tools=tools).message
    results = [
        {"role": "tool", "tool_name": call.function.name, "content": task["result"]}
        for call in message.tool_calls or ()
    ]
    answer = chat([order, message, *results], tools=tools).message.content
    calls = [{"name": c.function.name, "arguments": dict(c.function.arguments)} for c in message.tool_calls or ()]
    return {"calls": calls, "answer": answer or ""}


def structured():
    turns = [system, {"role": "user", "content": task["questions"][1]}]
    return json.loads(chat(turns, format=task["schema"]).message.content)


def refused():
    try:
        chat([user], options={"temperature": 3})
    except ollama.ResponseError as error:
        return {"type": type(error).__name__, "message": str(error)}


first = chat([system, user]).message
turns = [system, user, first, {"role": "user", "content": task["questions"][1]}]
assert chat(turns).message.content, "the second turn has no answer"
seen = {
    "models": [each.model.removesuffix(":latest") for each in client.list().models],
    "reply": first.content,
    "stream": {
        "pieces": [p for part in chat([system, user], stream=True) if (p := part.message.content)],
        "whole": first.content,
    },
    "tools": tool_call(),
    "structured": structured(),
    "error": refused(),
}
print(json.dumps(seen))
