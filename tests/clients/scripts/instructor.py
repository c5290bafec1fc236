# /// script
# dependencies = ["instructor==1.17.0"]
# [tool.headwater]
# shows = ["structured", "partial", "cached", "error"]
# ///
"""Instructor: objects from tools, from JSON schemas and as partial streams."""

import json
import os
from pathlib import Path

import instructor
import openai
from instructor import Mode
from pydantic import BaseModel, Field

task = json.loads(Path(os.environ["TASK"]).read_text())
client = openai.OpenAI(base_url=os.environ["BASE_URL"] + "/v1", api_key="none", max_retries=0)
greedy = {"model": os.environ["MODEL"], "temperature": 0, "max_tokens": 200, "max_retries": 0}
messages = [
    {"role": "system", "content": task["system"]},
    {"role": "user", "content": task["questions"][1]},
]


class Clock(BaseModel, extra="forbid"):
    """A clock."""

    number: str = Field(max_length=12)
    crowns: int = Field(ge=0, le=9999)


def clock(mode):
    return instructor.from_openai(client, mode=mode).chat.completions.create(
        response_model=Clock, messages=list(messages), **greedy
    )


def streamed():
    """Return the different states of a partial object."""
    client_of_schemas = instructor.from_openai(client, mode=Mode.JSON_SCHEMA)
    partial = client_of_schemas.chat.completions.create_partial(response_model=Clock, messages=list(messages), **greedy)
    states = [state.model_dump(exclude_none=True) for state in partial]
    return [state for state, before in zip(states, [{}, *states], strict=False) if state != before]


def refused():
    try:
        instructor.from_openai(client, mode=Mode.TOOLS).chat.completions.create(
            response_model=Clock, messages=list(messages), **greedy | {"temperature": 3}
        )
    except Exception as error:  # its own, of one kind or another by version, or the client's
        return {"type": type(error).__name__, "message": str(error)}


objects = [clock(mode).model_dump() for mode in (Mode.TOOLS, Mode.JSON_SCHEMA)]
print(json.dumps({"structured": objects[-1], "partial": streamed(), "error": refused()}))
