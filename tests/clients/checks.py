"""Checks of what a client saw, by name. Each returns a phrase for the table of results and raises AssertionError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jsonschema

Task = dict[str, Any]


def reply(text: str, task: Task) -> str:
    """Check the answer to the first question: text."""
    assert text.strip().rstrip(".") == task["answers"][0], text
    return "a right answer"


def answer(text: str, task: Task) -> str:
    """Check that any answer reached the client: text, for agents whose own prompts the embedded model does not know."""
    assert text.strip()
    return "an answer"


def stream(seen: dict[str, Any], task: Task) -> str:
    """Check that the pieces of a stream are the whole reply: {"pieces": [text, ...], "whole": text}."""
    assert len(seen["pieces"]) > 1
    assert "".join(seen["pieces"]) == seen["whole"] != "", seen
    return f"a stream of {len(seen['pieces'])} pieces"


def usage(seen: dict[str, int], task: Task) -> str:
    """Check the tokens of a second turn as the client counts them: {"prompt": n, "cached": n, "output": n}."""
    assert 0 < seen["cached"] <= seen["prompt"], seen
    assert seen["output"] > 0, seen
    return f"second turn {seen['cached']} of {seen['prompt']} tokens cached"


def again(seen: dict[str, int], task: Task) -> str:
    """Check the tokens of a second run, the same as the first one, as the client counts them: the form of `usage`.

    A server that resumes at any token may have all of them cached.
    """
    assert seen["prompt"] / 2 < seen["cached"] <= seen["prompt"], seen
    assert seen["output"] > 0, seen
    return f"second run {seen['cached']} of {seen['prompt']} tokens cached"


def cached(tokens: int, task: Task) -> str:
    """Check the tokens that the server did not compute while the client ran; the suite reads them, not the script."""
    assert tokens > 0
    return f"{tokens} tokens from the cache"


def tools(seen: dict[str, Any], task: Task) -> str:
    """Check calls of the task's tool, and the answer to their results: {"calls": [{"name", "arguments"}], "answer"}."""
    assert seen["calls"]
    for call in seen["calls"]:
        assert call["name"] == task["tool"]["name"], call
        jsonschema.validate(call["arguments"], task["tool"]["parameters"])
    assert isinstance(seen["answer"], str)
    return "a tool call and its result"


def structured(seen: dict[str, Any], task: Task) -> str:
    """Check an object that the client parsed: it fits the task's schema."""
    jsonschema.validate(seen, task["schema"])
    return "an object that fits its schema"


def partial(states: list[Any], task: Task) -> str:
    """Check a stream of objects: the states of one object, which fits the task's schema at the end."""
    assert len(states) > 1
    jsonschema.validate(states[-1], task["schema"])
    return f"a stream of {len(states)} partial objects"


def counted(seen: dict[str, int], task: Task) -> str:
    """Check a count of tokens against the prompt that was answered: {"counted": n, "prompt": n}."""
    assert seen["counted"] == seen["prompt"] > 0, seen
    return "counted tokens"


def responses(seen: dict[str, Any], task: Task) -> str:
    """Check an answer of the Responses API and its stream, as `stream` does."""
    return f"responses: {stream(seen, task)}"


def models(names: list[str], task: Task) -> str:
    """Check the list of models: names."""
    assert names == ["headwater-tiny"], names
    return "the list of models"


def error(seen: dict[str, str], task: Task) -> str:
    """Check that the refusal of `temperature` 3 reached the user as the client's exception: {"type", "message"}."""
    assert "temperature" in seen["message"], seen
    return seen["type"]


def overlong(seen: dict[str, str], task: Task) -> str:
    """Check that the refusal of a prompt beyond the model's length reached the user: {"type", "message"}."""
    assert "32,768" in seen["message"], seen
    return f"a prompt too long: {seen['type']}"


def load(seen: dict[str, int], task: Task) -> str:
    """Check the requests of a load test as the tool counts them: {"completed": n, "failed": n, "output": tokens}."""
    assert seen["completed"] > 0, seen
    assert seen["failed"] == 0, seen
    assert seen["output"] > 0, seen
    return f"{seen['completed']} requests"


def scores(seen: dict[str, float], task: Task) -> str:
    """Check the metrics of an evaluation, by task: shares between 0 and 1, of which "chat" is 1."""
    assert all(0 <= score <= 1 for score in seen.values()), seen
    assert seen["chat"] == 1, seen
    return ", ".join(f"{name} {score:.2f}" for name, score in seen.items())


CHECKS: dict[str, Callable[[Any, Task], str]] = {
    check.__name__: check
    for check in (
        reply,
        answer,
        stream,
        usage,
        again,
        cached,
        tools,
        structured,
        partial,
        counted,
        responses,
        models,
        error,
        overlong,
        load,
        scores,
    )
}
