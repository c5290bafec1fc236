# /// script
# dependencies = ["dspy==3.4.1"]
# [tool.headwater]
# shows = ["answer", "structured", "usage", "cached", "error"]
# ///
"""DSPy: a language model of LiteLLM's kind, and a typed signature."""

import json
import os
from pathlib import Path

import dspy

task = json.loads(Path(os.environ["TASK"]).read_text())
server = {"api_base": os.environ["BASE_URL"] + "/v1", "api_key": "none", "cache": False, "num_retries": 0}
name = "openai/" + os.environ["MODEL"]
model = dspy.LM(name, temperature=0, max_tokens=200, **server)
system = {"role": "system", "content": task["system"]}
first = {"role": "user", "content": task["questions"][0]}


class Clock(dspy.Signature):
    """Read the clock's number and price from the documents."""

    documents: str = dspy.InputField()
    question: str = dspy.InputField()
    number: str = dspy.OutputField()
    crowns: int = dspy.OutputField()


def structured():
    """Read a clock. For a model that it does not know DSPy asks for no schema, so the schema is a setting here."""
    schema = {"type": "json_schema", "json_schema": {"name": "clock", "schema": task["schema"], "strict": True}}
    held = dspy.LM(name, temperature=0, max_tokens=200, response_format=schema, **server)
    with dspy.context(lm=held, adapter=dspy.JSONAdapter()):
        read = dspy.Predict(Clock)(documents=task["system"], question=task["questions"][1])
    return {"number": read.number, "crowns": read.crowns}


def second_turn(answer):
    turns = [system, first, {"role": "assistant", "content": answer}, {"role": "user", "content": task["questions"][1]}]
    model(messages=turns)
    usage = model.history[-1]["usage"]
    details = usage["prompt_tokens_details"]
    cached = details["cached_tokens"] if isinstance(details, dict) else details.cached_tokens
    return {"prompt": usage["prompt_tokens"], "cached": cached, "output": usage["completion_tokens"]}


def refused():
    try:
        dspy.LM(name, **server)(messages=[first], temperature=3)
    except Exception as error:  # DSPy's own or LiteLLM's, by version
        return {"type": type(error).__name__, "message": str(error)}


answer = model(messages=[system, first])[0]
answer = answer if isinstance(answer, str) else answer["text"]
seen = {"answer": answer, "structured": structured(), "usage": second_turn(answer), "error": refused()}
print(json.dumps(seen))
