"""/v1/messages and /v1/messages/count_tokens: answers, streams, usage, and requests of Claude Code's shape."""

from __future__ import annotations

import asyncio
import json

import pytest

from headwater.account import CacheAccount, Reason
from headwater.config import ServeConfig
from headwater.engine.proof.selfcheck import SelfCheck
from headwater.events import FinishedEvent, TokenEvent
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.load import load_model
from headwater.server.answer.anthropic import SIGNATURE, MessagesReply, input_usage
from headwater.server.answer.formats import REASONING, TOOLS
from headwater.server.answer.formats.parser import AnswerParser
from headwater.server.requests.anthropic import MessagesRequest
from headwater.server.requests.normal_form import INVALID, mapping
from tests.checkpoints import checkpoint
from tests.exactness.rig import Make
from tests.server import templates
from tests.server.answer.formats.cases import WEATHER, WEATHER_TOOLS, WRITTEN
from tests.server.client import send, send_all
from tests.server.fake_engine import byte_tokenizer

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "hello"}]
MARK = {"cache_control": {"type": "ephemeral"}}
TOOL = {"name": "weather", "input_schema": WEATHER}
PING = {"name": "ping", "input_schema": {"type": "object"}}
CALLS = "\n".join(WRITTEN["hermes"]([("weather", {"city": "Bonn"})]) for _ in range(2))
THINK = {"thinking": {"type": "adaptive"}}


def ask(engine, config=None, **fields):
    return send(engine, "POST", MESSAGES, config, json={"messages": HELLO, "max_tokens": 400, **fields})


def events_of(response):
    """Return the events of a stream; the name of each must be the type of its data."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in response.text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_answer_is_a_message(engine):
    body = ask(engine, system="Be brief.").json()
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "fake")
    assert body["id"].startswith("msg_")
    assert body["content"] == [{"type": "text", "text": engine.script}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"]["output_tokens"] == len(engine.script.encode())
    assert body["usage"]["cache_creation_input_tokens"] == len(engine.seen[0].prompt)
    assert (body["headwater"]["reason"], body["headwater"]["warnings"]) == ("too_short", [])


def test_stream_has_its_events_in_their_order(engine):
    found = events_of(ask(engine, stream=True))
    types = [event["type"] for event in found if event["type"] != "content_block_delta"]
    assert types == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message = found[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    assert message["usage"]["input_tokens"] == len(engine.seen[0].prompt)
    deltas = [event for event in found if event["type"] == "content_block_delta"]
    assert {event["index"] for event in deltas} == {0}
    assert "".join(event["delta"]["text"] for event in deltas) == engine.script
    last = next(event for event in found if event["type"] == "message_delta")
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == len(engine.script.encode())


def reply(body, text, size, reason="stop", output_tokens=8):
    """Return the whole reply and the events of the same answer, which comes in pieces of this size."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    end = FinishedEvent(reason, "", CacheAccount(200, 64, 64, 0, Reason.DIVERGED), output_tokens)

    async def events():
        for piece in pieces:
            yield 0, TokenEvent(1, piece)
        yield 0, end

    def new():
        parser = AnswerParser(REASONING["think"], True, TOOLS["hermes"], WEATHER_TOOLS)
        sent = MessagesRequest.model_validate({"messages": HELLO, "max_tokens": 8, **body})
        return MessagesReply(sent, "m", parser, 200, 64)

    async def streamed():
        return [json.loads(event.split("data: ")[1]) async for event in new().stream(events(), False)]

    return asyncio.run(new().whole(events())), asyncio.run(streamed())


def assembled(found):
    """Return the message that a client puts together from a stream."""
    message, pieces = found[0]["message"], {}
    for event in found:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                pieces[event["index"]] = pieces.get(event["index"], "") + delta["partial_json"]
            else:
                field = delta["type"].removesuffix("_delta")
                block[field] += delta[field]
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"headwater": event["headwater"]}
            message["usage"] |= event["usage"]
    for index, piece in pieces.items():
        message["content"][index]["input"] = json.loads(piece)
    return message


def without_ids(message):
    return {**message, "id": "?", "content": [{**block, "id": "?"} for block in message["content"]]}


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_stream_adds_up_to_the_whole_message(size):
    whole, found = reply(THINK, f"Hm.\n</think>\n\nI look.\n\n{CALLS}", size)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][0] == {"type": "thinking", "thinking": "Hm.", "signature": SIGNATURE}
    assert whole["content"][1]["text"] == "I look."
    assert [block["input"] for block in whole["content"][2:]] == [{"city": "Bonn"}] * 2
    assert len({block["id"] for block in whole["content"][2:]}) == 2
    assert whole["stop_reason"] == "tool_use"
    assert without_ids(assembled(found)) == without_ids(whole)


def test_reasoning_that_was_not_requested_is_left_out():
    whole, found = reply({}, "Hm.\n</think>\n\nFine.", 3)
    assert whole["content"] == [{"type": "text", "text": "Fine."}]
    assert without_ids(assembled(found)) == without_ids(whole)


def test_arguments_that_were_cut_are_marked_as_no_json():
    whole, _ = reply({}, '</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bo', 5, "length")
    assert whole["content"][0]["input"] == {"INVALID_JSON": '{"city": "Bo'}
    assert whole["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"city": NaN}', "[1]"], ids=["deep", "not a number", "list"])
def test_arguments_that_are_not_a_json_object_are_marked_invalid(text):
    assert mapping(text) == {INVALID: text}


def test_answer_without_text_has_no_blocks():
    whole, found = reply({}, "", 1)
    assert whole["content"] == []
    assert [event["type"] for event in found] == ["message_start", "ping", "message_delta", "message_stop"]


def test_with_no_tokens_wanted_the_prompt_is_computed_and_nothing_answered(engine):
    body = ask(engine, max_tokens=0).json()
    assert (body["content"], body["stop_reason"], body["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert engine.seen[0].params.max_tokens == 1


def test_stop_sequences_end_an_answer_and_are_reported(engine):
    body = ask(engine, stop_sequences=["from", "zzz"]).json()
    assert body["content"][0]["text"] == "Grüße 🙂 "
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "from")


def test_greatest_length_is_a_reason_to_stop(engine):
    assert ask(engine, max_tokens=4).json()["stop_reason"] == "max_tokens"


def test_answer_beyond_the_models_length_ends_there(engine):
    engine.script, engine.max_model_len = "x" * 200, 150
    body = ask(engine, max_tokens=32_000).json()
    assert body["stop_reason"] == "model_context_window_exceeded"
    assert body["usage"]["cache_creation_input_tokens"] + body["usage"]["output_tokens"] == 150


def test_call_of_one_tool_only_ends_with_tool_use(engine):
    engine.chat_template, engine.script = templates.HERMES, CALLS
    body = ask(engine, tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}).json()
    assert [block["type"] for block in body["content"]] == ["tool_use"]
    assert (body["stop_reason"], body["stop_sequence"]) == ("tool_use", None)


def test_tool_that_must_be_called_constrains_the_answer(engine):
    engine.chat_template, engine.script = templates.HERMES, CALLS
    ask(engine, tools=[TOOL, PING], tool_choice={"type": "tool", "name": "weather"})
    source = engine.seen[0].params.constraint.source
    assert "weather" in source
    assert "ping" not in source


def test_usage_has_three_parts_that_add_up(engine):
    long = {"messages": [{"role": "user", "content": "word " * 60}], "max_tokens": 5}
    first, second = send_all(engine, [("POST", MESSAGES, {"json": long})] * 2)
    n = len(engine.seen[0].prompt)
    kept = (n - 1) // 64 * 64  # the engine of these tests resumes at pages
    parts = ("cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens")
    assert [first.json()["usage"][part] for part in parts] == [0, n, 0]
    assert [second.json()["usage"][part] for part in parts] == [kept, n - kept, 0]


def test_prompts_that_resume_at_pages_leave_the_last_page_to_compute():
    usage = input_usage(CacheAccount(200, 64, 64, 0, Reason.DIVERGED), 64)
    assert usage == {"input_tokens": 8, "cache_creation_input_tokens": 128, "cache_read_input_tokens": 64}


@pytest.mark.parametrize("grid", [1, 64])
def test_without_a_cache_nothing_is_read_or_created(grid):
    usage = input_usage(CacheAccount(200, 0, 0, 0, Reason.CACHE_OFF), grid)
    assert usage == {"input_tokens": 200, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def test_breakpoint_is_a_boundary_of_the_prompt(engine):
    system = [{"type": "text", "text": "Be brief. ", **MARK}, {"type": "text", "text": "Now."}]
    ask(engine, system=system, tools=[TOOL, {**PING, **MARK}])
    text = byte_tokenizer().decode(engine.seen[0].prompt, skip_special_tokens=False)
    after_system = len(text[: text.index("Now.")].encode()) - text.count("<|im_start|>", 0, text.index("Now.")) * 11
    assert len(engine.seen[0].boundaries.extra) == 2
    assert any(abs(at - after_system) <= 2 for at in engine.seen[0].boundaries.extra)


def test_repeated_prompt_reads_the_cache_that_the_first_created(tmp_path):
    prepare_process(2)
    numerics.use(Numerics())
    loaded = load_model(checkpoint(tmp_path, "qwen3_5"), "float32")
    system = [{"type": "text", "text": "again " * 300, **MARK}]
    with Make(loaded, SelfCheck(True, None, "compiled"))(500) as rig:
        rig.engine.chat_template = templates.SILENT
        sent = {"messages": HELLO, "system": system, "max_tokens": 2, "temperature": 0}
        first, second = (a.json()["usage"] for a in send_all(rig.engine, [("POST", MESSAGES, {"json": sent})] * 2))
    assert first["cache_creation_input_tokens"] >= 64
    assert second["cache_read_input_tokens"] == first["cache_creation_input_tokens"]
    assert second["input_tokens"] == first["input_tokens"]


# -- counting


def test_count_is_the_length_of_the_prompt(engine):
    shaped = {"system": "Be brief.", "tools": [TOOL], "messages": HELLO, "thinking": {"type": "adaptive"}}
    counted = send(engine, "POST", COUNT, json=shaped).json()
    ask(engine, **shaped)
    assert counted == {"input_tokens": len(engine.seen[0].prompt)}


# -- Claude Code

CLAUDE_CODE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "authorization": "Bearer key",
    "user-agent": "claude-cli/2.1.177 (external, cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
}


def claude_code(nonce, turns):
    """Return a body of the shape that Claude Code sends."""
    billing = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={nonce};"
    names = ("Bash", "Edit", "Glob", "Grep", "Read", "Task", "TodoWrite", "WebFetch", "Write", "mcp__files__list")
    return {
        "model": "claude-sonnet-4-5-20250929",
        "max_tokens": 32_000,
        "messages": turns,
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            {"type": "text", "text": "\nUse the tools. " * 40, **MARK},
        ],
        "tools": [{"name": name, "description": name, "input_schema": WEATHER} for name in names],
        "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"1"}'},
        "thinking": {"type": "enabled", "budget_tokens": 31_999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "temperature": 1,
        "stream": True,
    }


def test_turns_of_claude_code_are_answered_and_reuse_each_other(engine):
    reminder = {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>"}
    first = [{"role": "user", "content": [reminder, {"type": "text", "text": "list the files", **MARK}]}]
    use = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"city": "ls"}}
    said = [{"type": "thinking", "thinking": "Hm.", "signature": SIGNATURE}, {**use, **MARK}]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.py", "is_error": False, **MARK}
    second = [
        {"role": "user", "content": [reminder, {"type": "text", "text": "list the files"}]},
        {"role": "assistant", "content": said},
        {"role": "user", "content": [result]},
    ]
    engine.chat_template = templates.HERMES
    engine.script = f"Hm.\n</think>\n\n{WRITTEN['hermes']([('Bash', {'city': 'ls'})])}"
    engine.max_model_len = 32_768
    sent = [
        ("POST", f"{MESSAGES}?beta=true", {"json": claude_code(nonce, turns), "headers": CLAUDE_CODE_HEADERS})
        for nonce, turns in (("36ee5", first), ("0aaa9", second))
    ]
    one, two = send_all(engine, [("HEAD", "/", {}), *sent], ServeConfig(api_key="key"))[1:]
    message = assembled(events_of(one))
    assert [block["type"] for block in message["content"]] == ["thinking", "tool_use"]
    assert message["stop_reason"] == "tool_use"
    prompts = [byte_tokenizer().decode(seen.prompt, skip_special_tokens=False) for seen in engine.seen]
    assert all("billing" not in prompt for prompt in prompts)
    assert "You are Claude Code.\nUse the tools." in prompts[0]
    usage = assembled(events_of(two))["usage"]
    assert usage["cache_read_input_tokens"] > len(engine.seen[0].prompt) - 128
