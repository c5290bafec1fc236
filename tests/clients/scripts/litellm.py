# /// script
# dependencies = ["litellm==1.106.2"]
# [tool.headwater]
# shows = ["reply", "stream", "usage", "cached", "tools", "structured", "error"]
# ///
"""LiteLLM's SDK: completions, their streams, tools, structured answers; and Anthropic's and Ollama's APIs."""

import json
import os
from pathlib import Path

import litellm

task = json.loads(Path(os.environ["TASK"]).read_text())
server = {"model": "openai/" + os.environ["MODEL"], "api_base": os.environ["BASE_URL"] + "/v1", "api_key": "none"}
# without _skip_mcp_handler a call with tools imports a package of MCP servers before it sends anything
greedy = {**server, "temperature": 0, "max_tokens": task["max_tokens"], "num_retries": 0, "_skip_mcp_handler": True}
system = {"role": "system", "content": task["system"]}
user = {"role": "user", "content": task["questions"][0]}


def streamed():
    chunks = list(litellm.completion(messages=[system, user], stream=True, **greedy))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    whole = litellm.stream_chunk_builder(chunks).choices[0].message.content
    return {"pieces": [piece for piece in pieces if piece], "whole": whole}


def second_turn(message):
    turns = [system, user, message.model_dump(), {"role": "user", "content": task["questions"][1]}]
    usage = litellm.completion(messages=turns, **greedy).usage
    cached = usage.prompt_tokens_details.cached_tokens
    return {"prompt": usage.prompt_tokens, "cached": cached, "output": usage.completion_tokens}


def tool_call():
    tools = [{"type": "function", "function": task["tool"]}]
    order = {"role": "user", "content": task["order"]}
    ask = {**greedy, "tools": tools}
    message = litellm.completion(messages=[order], tool_choice="required", **ask).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": task["result"]} for call in message.tool_calls]
    answer = litellm.completion(messages=[order, message.model_dump(), *results], **ask).choices[0].message.content
    calls = [{"name": c.function.name, "arguments": json.loads(c.function.arguments)} for c in message.tool_calls]
    return {"calls": calls, "answer": answer or ""}


def structured():
    schema = {"type": "json_schema", "json_schema": {"name": "clock", "schema": task["schema"], "strict": True}}
    turns = [system, {"role": "user", "content": task["questions"][1]}]
    answer = litellm.completion(messages=turns, response_format=schema, **greedy | {"max_tokens": 200})
    return json.loads(answer.choices[0].message.content)


def replies_of_other_apis():
    """Return the first answer as LiteLLM gets it from the server's other APIs."""
    root = os.environ["BASE_URL"]
    bases = {"anthropic": root, "ollama_chat": root, "hosted_vllm": root + "/v1"}
    answers = []
    for provider, base in bases.items():
        ask = {**greedy, "model": f"{provider}/{os.environ['MODEL']}", "api_base": base}
        answers.append(litellm.completion(messages=[system, user], **ask).choices[0].message.content)
    return answers


def refused():
    try:
        litellm.completion(messages=[user], temperature=3, **server)
    except litellm.BadRequestError as error:
        return {"type": type(error).__name__, "message": str(error)}


first = litellm.completion(messages=[system, user], **greedy).choices[0].message
others = replies_of_other_apis()
assert set(others) == {first.content}, others
seen = {
    "reply": first.content,
    "stream": streamed(),
    "usage": second_turn(first),
    "tools": tool_call(),
    "structured": structured(),
    "error": refused(),
}
print(json.dumps(seen))
