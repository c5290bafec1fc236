# /// script
# dependencies = ["langchain-openai==1.7.3"]
# [tool.headwater]
# shows = ["reply", "stream", "usage", "cached", "tools", "structured", "error"]
# ///
"""LangChain's chat model for OpenAI: messages, their streams, tools and structured output."""

import json
import os
from pathlib import Path

import openai
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI

task = json.loads(Path(os.environ["TASK"]).read_text())
server = {"base_url": os.environ["BASE_URL"] + "/v1", "api_key": "none", "model": os.environ["MODEL"], "max_retries": 0}
model = ChatOpenAI(temperature=0, max_tokens=task["max_tokens"], **server)
documents = [SystemMessage(task["system"])]
first_turn = [*documents, HumanMessage(task["questions"][0])]


def streamed():
    pieces = [chunk.text for chunk in model.stream(first_turn)]
    return {"pieces": [piece for piece in pieces if piece], "whole": model.invoke(first_turn).text}


def second_turn(message):
    usage = model.invoke([*first_turn, message, HumanMessage(task["questions"][1])]).usage_metadata
    cached = usage["input_token_details"]["cache_read"]
    return {"prompt": usage["input_tokens"], "cached": cached, "output": usage["output_tokens"]}


def tool_call():
    order = HumanMessage(task["order"])
    tools = [{"type": "function", "function": task["tool"]}]
    message = model.bind_tools(tools, tool_choice="required").invoke([order])
    results = [ToolMessage(task["result"], tool_call_id=call["id"]) for call in message.tool_calls]
    answer = model.bind_tools(tools).invoke([order, message, *results]).text
    return {
        "calls": [{"name": call["name"], "arguments": call["args"]} for call in message.tool_calls],
        "answer": answer,
    }


def structured():
    longer = ChatOpenAI(temperature=0, max_tokens=200, **server)
    schema = {"title": "clock", "description": "A clock.", **task["schema"]}
    return longer.with_structured_output(schema).invoke([*documents, HumanMessage(task["questions"][1])])


def refused():
    try:
        ChatOpenAI(temperature=3, **server).invoke(first_turn)
    except openai.BadRequestError as error:
        return {"type": type(error).__name__, "message": str(error)}


first = model.invoke(first_turn)
seen = {
    "reply": first.text,
    "stream": streamed(),
    "usage": second_turn(first),
    "tools": tool_call(),
    "structured": structured(),
    "error": refused(),
}
print(json.dumps(seen))
