"""Messages in all the forms in which clients send them, and the breakpoints in them."""

from __future__ import annotations

import json
import re

import pytest

from headwater.engine.proof.selfcheck import SelfCheck
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.load import load_model
from headwater.plan import Retention
from headwater.server.prompt.chat import ChatPrompter
from headwater.server.prompt.template import ChatTemplate
from headwater.server.requests.messages import Breakpoint, ToolBreakpoint, conversation
from tests.checkpoints import checkpoint
from tests.exactness.rig import Make
from tests.server import templates
from tests.server.client import send_all
from tests.server.fake_engine import byte_tokenizer

MARK = {"cache_control": {"type": "ephemeral"}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
DECODED = {**CALL, "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("zip", "add")]


def text(words, **more):
    return {"type": "text", "text": words, **more}


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [CALL]},
         {"role": "assistant", "content": "", "tool_calls": [DECODED]}),
        ({"role": "assistant", "content": "x", "tool_calls": [], "function_call": None, "refusal": None, "audio": None},
         {"role": "assistant", "content": "x"}),
        ({"role": "assistant", "content": None, "function_call": CALL["function"]},
         {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": DECODED["function"]}]}),
        ({"role": "assistant", "content": None, "refusal": "No."}, {"role": "assistant", "content": "No."}),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
         {"role": "assistant", "content": "No."}),
        ({"role": "assistant", "content": "x", "reasoning": "Hm."},
         {"role": "assistant", "content": "x", "reasoning_content": "Hm."}),
        ({"role": "assistant", "content": "x", "reasoning_content": "Hm.", "reasoning": "Hm."},
         {"role": "assistant", "content": "x", "reasoning_content": "Hm."}),
        ({"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, text("x")]},
         {"role": "assistant", "content": "x", "reasoning_content": "Hm."}),
        ({"role": "function", "name": "add", "content": "3"}, {"role": "tool", "name": "add", "content": "3"}),
        ({"role": "tool", "tool_call_id": "c", "content": [text("3"), text("4", **MARK)]},
         {"role": "tool", "tool_call_id": "c", "content": "34"}),
        ({"role": "user", "content": [{"type": "input_text", "text": "hi"}], "name": "Ann"},
         {"role": "user", "content": "hi", "name": "Ann"}),
    ],
)  # fmt: skip
def test_client_messages_become_template_messages(sent, shown):
    assert conversation([sent]).messages == (shown,)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", None, 3])
def test_content_parts_other_than_text_are_refused_by_type(kind):
    with pytest.raises(ValueError, match=repr(kind)):
        conversation([{"role": "user", "content": [{"type": kind}]}])


def prepared(template, messages, tools=None):
    prompter = ChatPrompter(byte_tokenizer(), ChatTemplate(template))
    return prompter.prepare(conversation(messages, tools, rules=prompter.rules))


def before(prompt, position):
    return byte_tokenizer().decode(prompt.prompt[: position + 1], skip_special_tokens=False)


def test_developer_is_the_system_where_the_template_knows_no_other():
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert "<|im_start|>system\nBe brief." in before(prepared(templates.REASONING, messages), 40)
    knows = templates.DEFAULT_SYSTEM + "{# developer #}"
    assert "<|im_start|>developer" in before(prepared(knows, messages), 300)


@pytest.mark.parametrize(
    ("parts", "ends"),
    [
        ([text("Rules.", **MARK), text(" More.")], ["Rules."]),
        ([text("Rules.", **MARK), text("Quick."), text("zig", **MARK)], ["Rules.", "Rules.Quick.zig"]),
        ([text("Rules."), text("Quick.", **MARK)], ["Rules.Quick."]),
    ],
)
def test_breakpoints_stand_where_their_parts_end(parts, ends):
    messages = [{"role": "system", "content": parts}, {"role": "user", "content": "hi"}]
    prompt = prepared(templates.REASONING, messages)
    plain = prepared(
        templates.REASONING, [{"role": "system", "content": "".join(p["text"] for p in parts)}, messages[1]]
    )
    assert prompt.prompt == plain.prompt
    assert [before(prompt, at) for at in prompt.boundaries.extra] == [
        f"<|im_start|>system\n{end}"[: len(f"<|im_start|>system\n{end}")] for end in ends
    ]
    assert plain.boundaries.extra == ()


def test_message_or_a_tool_may_carry_the_breakpoint():
    messages = [{"role": "system", "content": "Rules.", **MARK}, {"role": "user", "content": "hi"}]
    (at,) = prepared(templates.REASONING, messages).boundaries.extra
    assert before(prepared(templates.REASONING, messages), at) == "<|im_start|>system\nRules."
    tools = [{**TOOLS[0], **MARK}, TOOLS[1]]
    marked, plain = (
        prepared(templates.REASONING, messages[1:], tools),
        prepared(templates.REASONING, messages[1:], TOOLS),
    )
    assert marked.prompt == plain.prompt  # templates do not see it
    (at,) = marked.boundaries.extra
    assert json.dumps(TOOLS[0]) in before(marked, at)
    assert '"add"' not in before(marked, at)


def test_trimming_template_moves_the_breakpoint_with_the_text():
    messages = [{"role": "user", "content": [text("Rules. \n", **MARK)]}]
    prompt = prepared(templates.DEFAULT_SYSTEM, messages)
    assert before(prompt, prompt.boundaries.extra[0]).endswith("user\nRules.")


def test_breakpoints_are_found_in_messages_and_in_tools():
    messages = [{"role": "user", "content": [text("ab", **MARK), text("c")], **MARK}]
    found = conversation(messages, [{"type": "function", "function": {"name": "f", **MARK}}])
    assert found.breakpoints == (Breakpoint(0, 2), Breakpoint(0, 3))
    assert found.tool_breakpoints == (ToolBreakpoint(0),)
    assert found.tools == [{"type": "function", "function": {"name": "f"}}]


def test_bad_breakpoints_are_refused():
    with pytest.raises(ValueError, match="5 parts have cache_control, at most 4"):
        conversation([{"role": "user", "content": [text("a", **MARK)] * 5}])
    with pytest.raises(ValueError, match="'ephemeral'"):
        conversation([{"role": "user", "content": [text("a", cache_control={"type": "eternal"})]}])


def control(ttl):
    return {"cache_control": {"type": "ephemeral", "ttl": ttl}}


def test_time_to_live_is_read_in_seconds():
    messages = [{"role": "user", "content": [text("ab", **control("5m")), text("c", **control(None))]}]
    found = conversation(messages, [{"type": "function", "function": {"name": "f", **control("1h")}}])
    assert found.breakpoints == (Breakpoint(0, 2, 300.0), Breakpoint(0, 3))
    assert found.tool_breakpoints == (ToolBreakpoint(0, 3600.0),)


@pytest.mark.parametrize("ttl", ["2h", "", 300, ["5m"]])
def test_unsupported_ttl_is_refused_with_the_accepted_values(ttl):
    with pytest.raises(ValueError, match=re.escape(f"ttl of cache_control is {ttl!r}, it must be '5m' or '1h'")):
        conversation([{"role": "user", "content": [text("a", **control(ttl))]}])


def test_positions_with_a_time_to_live_are_boundaries_with_it():
    content = [text("Rules. ", **control("1h")), text("More. ", **MARK), text("Hi.")]
    prompt = prepared(templates.SILENT, [{"role": "user", "content": content}])
    timed, plain = prompt.boundaries.extra
    assert prompt.boundaries.retained == (Retention(timed, 3600.0),)
    assert before(prompt, timed).endswith("Rules. ")
    assert before(prompt, plain).endswith("More. ")


def test_second_request_resumes_at_the_breakpoint(tmp_path):
    prepare_process(2)
    numerics.use(Numerics())
    loaded = load_model(checkpoint(tmp_path, "qwen3_5"), "float32")
    shared, own = "again " * 400, "here and there " * 150
    with Make(loaded, SelfCheck(True, None, "compiled"))(500) as rig:
        rig.engine.chat_template = templates.SILENT

        def body(salt, name, **mark):
            parts = [text(shared, **mark), text(f"{name} {own}")]
            messages = [{"role": "system", "content": parts}, {"role": "user", "content": "hi"}]
            sent = {"messages": messages, "max_tokens": 1, "cache_salt": salt}
            return ("POST", "/v1/chat/completions", {"json": sent})

        asked = [body("marked", name, **MARK) for name in ("some", "other")]
        asked += [body("plain", name) for name in ("some", "other")]
        answers = [answer.json() for answer in send_all(rig.engine, asked)]
    first, second, *plain = [answer["headwater"]["resumed_at"] for answer in answers]
    length = len(loaded.tokenizer.encode(shared).ids)
    assert (first, plain) == (0, [0, 0])
    assert abs(second - length) <= 8


def test_account_names_the_message_in_which_the_prompt_diverges(tmp_path):
    prepare_process(2)
    numerics.use(Numerics())
    loaded = load_model(checkpoint(tmp_path, "qwen3_5"), "float32")
    rules, first = "again " * 300, "here and there " * 100
    with Make(loaded, SelfCheck(True, None, "compiled"))(500) as rig:
        rig.engine.chat_template = templates.SILENT

        def body(system, question):
            answered = ("user", question), ("assistant", "So."), ("user", "why")
            turns = [("system", system), ("developer", "Be brief."), *answered]  # the first two become one message
            sent = [{"role": role, "content": content} for role, content in turns]
            return ("POST", "/v1/chat/completions", {"json": {"messages": sent, "max_tokens": 1}})

        asked = [body(rules, first), body(rules, f"{first}then"), body(f"{rules}more", first), body(rules, first)]
        accounts = [answer.json()["headwater"] for answer in send_all(rig.engine, asked)]
    assert [one["diverged_in"] for one in accounts if one["reason"] == "diverged"] == [2, 0]
    assert [one["reason"] for one in accounts] == ["cold", "diverged", "diverged", "full"]
