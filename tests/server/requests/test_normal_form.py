"""Normal form of conversations: every odd turn that clients send, for templates that raise on it or drop it."""

from __future__ import annotations

import pytest

from headwater.errors import TemplateError
from headwater.server.prompt.chat import ChatPrompter
from headwater.server.prompt.template import ChatTemplate, common_prefix
from headwater.server.requests.messages import conversation
from headwater.server.requests.normal_form import EFFORTS, MessageRules, decoded, normal_form
from tests.server import templates
from tests.server.fake_engine import byte_tokenizer
from tests.server.templates import published

SYSTEM, USER, ANSWER = ({"role": role, "content": text} for role, text in (
    ("system", "Be brief."), ("user", "hi"), ("assistant", "ok")))  # fmt: skip
LATER = {"role": "system", "content": "Now in French."}
OWN = {
    "strict": templates.STRICT,
    "dropping": templates.DROPPING,
    "lines": templates.LINES,
    "marking": templates.MARKING,
}
EVERY = [pytest.param(source, id=name) for name, source in OWN.items()] + published()


def call(arguments, **more):
    return {"id": "c1", "type": "function", "function": {"name": "write", "arguments": arguments}, **more}


def calling(arguments):
    return {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}


def result(content="done", id_="c1"):
    return {"role": "tool", "tool_call_id": id_, "content": content}


def prompt(source, messages, **variables):
    """Return the text of a conversation's prompt with a template."""
    prompter = ChatPrompter(byte_tokenizer(), ChatTemplate(source, {"bos_token": "", "eos_token": ""}))
    sent = conversation(messages, None, variables, rules=prompter.rules)
    return byte_tokenizer().decode(prompter.prepare(sent).prompt, skip_special_tokens=False)


def normal(messages, **rules):
    """Return roles and texts of a conversation's normal form."""
    form = normal_form(messages, MessageRules(**rules))
    return [(one.message["role"], "".join(part["text"] for part in one.message["content"])) for one in form]


@pytest.mark.parametrize("source", EVERY)
@pytest.mark.parametrize(
    ("messages", "texts"),
    [
        ([SYSTEM, USER, ANSWER, LATER, USER], ["Be brief.", "Now in French."]),
        ([SYSTEM, LATER, USER], ["Be brief.", "Now in French."]),
        ([SYSTEM, {**LATER, "role": "developer"}, USER], ["Be brief.", "Now in French."]),
        ([USER, LATER, USER], ["Now in French."]),
        ([SYSTEM, calling("{}"), result()], ["Be brief.", "done"]),
        ([SYSTEM], ["Be brief."]),
        ([{"role": "user", "content": "<tool_response>\nx\n</tool_response>"}], ["x"]),
        ([{"role": "assistant", "content": "Hello."}, USER], ["Hello.", "hi"]),
        ([USER, {"role": "assistant", "content": None}, USER], ["hi"]),
        ([USER, {"role": "assistant", "content": [], "tool_calls": []}, USER], ["hi"]),
        ([USER, {"role": "assistant"}, {"role": "user", "content": None}], ["hi"]),
        ([USER, calling('{"path": "zzz'), result(), USER], ["zzz", "done"]),
        ([USER, calling('["zzz"]'), result(), USER], ["zzz", "done"]),
        ([USER, calling("null"), result(None), USER], ["write"]),
        ([USER, calling('"zzz"'), result(), USER], ["zzz", "done"]),
        ([USER, calling({"path": "zzz"}), result(), USER], ["zzz", "done"]),
    ],
)  # fmt: skip
def test_odd_turns_are_shown_by_every_template(source, messages, texts):
    text = prompt(source, messages)
    places = [text.find(wanted) for wanted in texts]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize("source", EVERY)
def test_next_turn_begins_with_the_prompt_before(source):
    first = [SYSTEM, USER, calling('{"path": "a'), result(), LATER, USER]
    before, after = prompt(source, first), prompt(source, [*first, ANSWER, USER])
    assert "Now in French." in after[: common_prefix(before, after)]


@pytest.mark.parametrize("source", EVERY)
def test_conversation_without_a_query_keeps_its_prefix(source):
    first = [SYSTEM, calling("{}"), result()]
    before, after = prompt(source, first), prompt(source, [*first, calling("{}"), result("done again")])
    assert after.startswith(before[: before.index("done") + 4])


def test_leading_system_texts_become_one_message():
    developer = {"role": "developer", "content": [{"type": "text", "text": "B"}, {"type": "input_text", "text": "C"}]}
    assert normal([{"role": "system", "content": "A"}, developer, USER]) == [("system", "A\n\nBC"), ("user", "hi")]
    assert normal([{"role": "system", "content": ""}, LATER]) == [("system", "Now in French.")]


def test_later_system_text_is_marked_as_the_systems():
    shown = normal([SYSTEM, USER, LATER, USER], later_system=False)
    assert shown == [
        ("system", "Be brief."), ("user", "hi"), ("user", "<system>\nNow in French.\n</system>"), ("user", "hi"),
    ]  # fmt: skip
    merged = normal([USER, LATER, USER], later_system=False, merged_roles=("user",))
    assert merged == [("user", "hi\n\n<system>\nNow in French.\n</system>\n\nhi")]


def test_breakpoints_move_with_merged_messages():
    mark = {"cache_control": {"type": "ephemeral"}}
    found = conversation(
        [{**SYSTEM, **mark}, {"role": "system", "content": [{"type": "text", "text": "More.", **mark}]}]
    )
    assert [(point.message, point.characters) for point in found.breakpoints] == [(0, 9), (0, 16)]
    assert found.messages == ({"role": "system", "content": "Be brief.\n\nMore."},)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("", {}), (None, {}), ("null", {}),
        ('{"a": "b', {"INVALID_JSON": '{"a": "b'}), ("[1]", {"INVALID_JSON": "[1]"}), ('"x"', {"INVALID_JSON": '"x"'}),
        ("[" * 100_000, {"INVALID_JSON": "[" * 100_000}),
    ],
)  # fmt: skip
def test_arguments_of_calls_are_always_a_mapping(arguments, shown):
    assert decoded(call(arguments))["function"]["arguments"] == shown


def test_call_without_a_name_stays_as_text():
    nameless = {"id": "c", "type": "function", "function": {"arguments": "{}"}}
    ((role, text),) = normal([{"role": "assistant", "content": "So: ", "tool_calls": [nameless]}])
    assert (role, text) == ("assistant", 'So: {"id": "c", "type": "function", "function": {"arguments": "{}"}}')
    custom = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "***"}}
    assert decoded(custom)["function"] == {"name": "patch", "arguments": {"input": "***"}}
    assert decoded({"custom": {"name": "patch"}})["function"] == {"name": "patch", "arguments": {"input": None}}


def test_images_in_history_become_placeholders():
    image = {"role": "user", "content": [{"type": "text", "text": "See: "}, {"type": "image_url", "image_url": {}}]}
    assert normal([image, ANSWER, USER])[0] == ("user", "See: [image_url left out]")
    shot = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "image", "source": {}}]}
    assert normal([USER, calling("{}"), shot])[-1] == ("tool", "[image left out]")
    with pytest.raises(ValueError, match="message 2 of role 'user' has a part of type 'image_url', and this model"):
        normal([USER, ANSWER, image])


def test_parts_are_joined_by_the_templates_rule():
    parts = {"role": "user", "content": [{"type": "text", "text": "alpha"}, {"type": "text", "text": "beta"}]}
    assert "alpha\nbeta" in prompt(templates.LINES, [parts])
    assert "alphabeta" in prompt(templates.STRICT, [parts])


def test_billing_line_is_left_out_unless_kept():
    line = {"role": "system", "content": "x-anthropic-billing-header: cch=1;\nBe brief."}
    assert normal([line, USER]) == [("system", "Be brief."), ("user", "hi")]
    assert normal([line, USER], billing=True)[0][1].startswith("x-anthropic")
    only = {
        "role": "developer",
        "content": [{"type": "text", "text": "x-anthropic-billing-header: a"}, SYSTEM["content"]],
    }
    assert normal([only, USER])[0] == ("system", "Be brief.")


def test_ids_of_other_models_calls_are_rewritten_for_kimi():
    twice = {"role": "assistant", "content": "", "tool_calls": [call("{}"), call("{}", id="functions.write:7")]}
    form = normal_form([twice, result("a"), result("b", "functions.write:7")], MessageRules(shows_call_ids=True))
    assert [one["id"] for one in form[0].message["tool_calls"]] == ["functions.write:0", "functions.write:7"]
    assert [one.message["tool_call_id"] for one in form[1:]] == ["functions.write:0", "functions.write:7"]


@pytest.mark.parametrize("odd", [[], {}, 5, None])
def test_id_other_than_a_text_is_replaced_for_kimi(odd):
    once = {"role": "assistant", "content": "", "tool_calls": [call("{}", id=odd)]}
    form = normal_form([once, result("a", odd)], MessageRules(shows_call_ids=True))
    assert form[0].message["tool_calls"][0]["id"] == form[1].message["tool_call_id"] == "functions.write:0"


@pytest.mark.parametrize(
    ("known", "wanted", "shown"),
    [((), "max", "max"), (("low", "medium", "high"), "max", "high"), (("low", "high"), "minimal", "low"),
     (EFFORTS, "xhigh", "xhigh"), (("low",), "own word", "own word")],
)  # fmt: skip
def test_effort_is_the_nearest_that_the_template_knows(known, wanted, shown):
    assert MessageRules(efforts=known).effort(wanted) == shown


def test_word_switches_reasoning_where_the_template_reads_words():
    assert prompt(templates.DROPPING, [SYSTEM, USER], enable_thinking=False).endswith("<think></think>")
    assert prompt(templates.DROPPING, [USER], enable_thinking=False).endswith("<think></think>")
    assert prompt(templates.DROPPING, [SYSTEM, USER]).endswith("<think>\n\n")
    assert "/no_think" not in prompt(templates.DROPPING, [SYSTEM, USER], enable_thinking=False)


def test_thoughts_are_given_in_the_field_that_the_template_reads():
    turns = [USER, {**calling("{}"), "reasoning_content": "Thus."}, result()]
    assert "<think>Thus.</think>" in prompt(templates.MARKING, turns)
    assert "<think>\nThus.\n</think>" in prompt(templates.STRICT, turns)


def test_harmony_shows_each_call_with_its_result_and_thoughts_with_texts():
    first, second = call("{}"), {**call("{}"), "id": "c2"}
    asking = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [first, second]}
    text = prompt(templates.HARMONY, [USER, asking, result("one"), result("two", "c2")], reasoning_effort="low")
    assert text.startswith("<|start|>system<|message|>Reasoning: low<|end|>")
    named = f"functions.{first['function']['name']}"
    calls = f"<|start|>assistant to={named}<|channel|>commentary json<|message|>{{}}<|call|>"
    of = f"<|start|>{named} to=assistant<|channel|>commentary<|message|>"
    shown = f'<|channel|>analysis<|message|>Hm.\nI look.<|end|>{calls}{of}"one"<|end|>{calls}{of}"two"<|end|>'
    assert text.endswith(f"{shown}<|start|>assistant")


def test_template_that_names_one_effort_knows_the_usual_ones():
    template = ChatTemplate(templates.HARMONY, {"bos_token": "", "eos_token": ""})
    assert ChatPrompter(byte_tokenizer(), template).rules.efforts == ("low", "medium", "high")


def test_error_names_the_first_message_that_a_template_refuses():
    picky = "{% for m in messages %}{% if 'zzz' in m.content %}{{ raise_exception('no zzz') }}{% endif %}{% endfor %}"
    bad = {"role": "user", "content": "zzz"}
    with pytest.raises(TemplateError, match=r"no zzz \(message 3, of role 'user', is the first that it refuses\)"):
        prompt(picky, [SYSTEM, LATER, ANSWER, bad, ANSWER, bad, USER])  # the first two become one message
