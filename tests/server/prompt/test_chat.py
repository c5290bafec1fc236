"""Boundaries found by probing, on templates with every difficult habit."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import TemplateError
from headwater.models.files import embedded
from headwater.request import Boundaries
from headwater.server.prompt.chat import ChatPrompter
from headwater.server.prompt.template import ChatTemplate, common_prefix
from headwater.server.requests.messages import Conversation
from tests.server import templates
from tests.server.fake_engine import byte_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("zip", "add")]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def tool(text):
    return {"role": "tool", "content": text}


def prepare(template, messages, tools=None, **variables):
    prompter = ChatPrompter(byte_tokenizer(), ChatTemplate(template))
    return prompter.prepare(Conversation(tuple(messages), tools, variables))


def text_before(prompt, position):
    """Return the prompt's text up to a boundary and one token more, since boundaries leave out their last token."""
    return byte_tokenizer().decode(prompt.prompt[: position + 1], skip_special_tokens=False)


def test_parts_of_a_reasoning_chat_are_found():
    prompt = prepare(templates.REASONING, [SYSTEM, user("one?"), assistant("Well.\n</think>\n\n1"), user("two?")])
    system = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert text_before(prompt, prompt.boundaries.system_end) == system
    query = system + "one?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n<|im_start|>user\n"
    assert text_before(prompt, prompt.boundaries.query_start) == query
    assert text_before(prompt, prompt.boundaries.query_end) == query + "two?<|im_end|>\n<|im_start|>assistant\n"


EMBEDDED = (embedded() / "chat_template.jinja").read_text("utf-8")
EVERY = [pytest.param(EMBEDDED, id="embedded"), *templates.published()]


def whole(prompt):
    return byte_tokenizer().decode(prompt.prompt, skip_special_tokens=False)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("template", EVERY)
def test_boundaries_of_published_templates_are_those_of_rendered_texts(template, tools):
    """A boundary ends what the prompt shares with a conversation that has another text there."""
    messages = [SYSTEM, user("one?"), assistant("1"), user("two?")]
    prompt = prepare(template, messages, tools)
    parts = prompt.boundaries
    others = {
        parts.system_end: [SYSTEM, user("Zebra!"), *messages[2:]],
        parts.query_start: [*messages[:3], user("Zebra!")],
        parts.query_end: [*messages, assistant("Zebra!"), user("three?")],
    }
    for position, other in others.items():
        text = whole(prompt)
        assert text_before(prompt, position) == text[: common_prefix(text, whole(prepare(template, other, tools)))]
    system, query, end = (text_before(prompt, position) for position in others)
    assert "Be brief." in system
    assert "one?" not in system
    assert "one?" in query
    assert "two?" not in query
    assert "two?" in end


@pytest.mark.parametrize("template", EVERY)
def test_generation_block_of_a_template_is_transparent(template):
    """It marks answers for training, in templates such as that of SmolLM3."""
    around = "{%- generation -%}{{- '' -}}{%- endgeneration -%}"
    messages = [SYSTEM, user("one?"), assistant("1"), user("two?")]
    assert prepare(around + template, messages) == prepare(template, messages)


def test_output_is_not_kept_where_its_reasoning_will_be_stripped():
    assert prepare(templates.REASONING, [user("one?")]).keep_output is False


def test_output_is_kept_where_a_tool_may_answer_it():
    assert prepare(templates.REASONING, [user("one?")], TOOLS).keep_output is True


def test_reasoning_that_a_template_reads_in_a_field_only_is_probed_there():
    """The template writes an empty block for it in past answers, as Nemotron 3's does."""
    system = "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n"
    for tools in None, TOOLS:
        prompt = prepare(templates.FIELD_ONLY, [user("one?")], tools)
        assert text_before(prompt, prompt.boundaries.query_end) == system + "<think>"
        assert prompt.keep_output is (tools is not None)
        later = prepare(templates.FIELD_ONLY, [user("one?"), assistant("1"), user("two?")], tools)
        assert whole(later).startswith(system + "<think></think>1")


def test_output_is_kept_where_nothing_is_stripped():
    prompt = prepare(templates.DEFAULT_SYSTEM, [user("one?")])
    assert prompt.keep_output is True
    assert prompt.boundaries.query_end == len(prompt.prompt) - 1


def test_output_is_kept_if_template_only_adds_a_leading_space():
    template = (embedded() / "chat_template.jinja").read_text("utf-8")
    assert prepare(template, [SYSTEM, user("one?")]).keep_output is True


def test_output_is_not_kept_where_its_empty_reasoning_block_will_be_stripped():
    assert prepare(templates.REASONING, [user("one?")], enable_thinking=False).keep_output is False


def test_next_turn_begins_with_the_prompt_up_to_the_boundary():
    messages = [SYSTEM, user("one?")]
    now = prepare(templates.REASONING, messages)
    later = prepare(templates.REASONING, [*messages, assistant("Hm.\n</think>\n\n1"), user("two?")])
    kept = now.boundaries.query_end
    assert later.prompt[: kept + 1] == now.prompt[: kept + 1]
    assert later.prompt[: len(now.prompt)] != now.prompt


def test_default_system_prompt_belongs_to_the_system_part():
    prompt = prepare(templates.DEFAULT_SYSTEM, [user("  one?")])
    assert text_before(prompt, prompt.boundaries.system_end).endswith("useful.<|im_end|>\n<|im_start|>user\n")


def test_tools_in_the_system_prompt_belong_to_the_system_part():
    prompt = prepare(templates.REASONING, [SYSTEM, user("one?")], TOOLS)
    assert '"add"' in text_before(prompt, prompt.boundaries.system_end)


def test_sorted_tools_before_the_last_message_are_not_the_next_turns():
    prompt = prepare(templates.SORTED_TOOLS, [SYSTEM, user("one?"), assistant("1"), user("two?")], TOOLS)
    assert text_before(prompt, prompt.boundaries.system_end).endswith("Be brief.<|im_end|>\n<|im_start|>user\n")
    assert text_before(prompt, prompt.boundaries.query_start).endswith("[TOOLS]add;zip;[/TOOLS]\n<|im_start|>user\n")
    # in the next turn the tools stand further down: only the text before them stays
    assert text_before(prompt, prompt.boundaries.query_end).endswith("<|im_start|>assistant\n1<|im_end|>\n")
    swapped = prepare(templates.SORTED_TOOLS, [SYSTEM, user("one?"), assistant("1"), user("two?")], TOOLS[::-1])
    assert swapped == prompt


def test_tools_result_is_not_the_last_query():
    messages = [SYSTEM, user("add 1 and 2"), assistant("Hm.\n</think>\n\nI call add."), tool("3")]
    prompt = prepare(templates.REASONING, messages, TOOLS)
    assert text_before(prompt, prompt.boundaries.query_start).endswith("<|im_start|>user\n")
    assert text_before(prompt, prompt.boundaries.query_end).endswith("add 1 and 2<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("template", [templates.REASONING, templates.ALTERNATING])
def test_tool_result_in_a_user_message_is_not_the_last_query(template):
    messages = [user("add"), assistant("<tool_call>"), user("<tool_response>\n3\n</tool_response>")]
    prompt = prepare(template, messages)
    assert text_before(prompt, prompt.boundaries.query_start).endswith("<|im_start|>user\n")
    assert "add" not in text_before(prompt, prompt.boundaries.query_start)


def test_tool_result_rendered_as_user_is_not_the_last_query():
    prompt = prepare(templates.ALTERNATING, [SYSTEM, user("add 1 and 2"), assistant("I call add."), tool("3")])
    assert "<|im_start|>user\n3<|im_end|>" in byte_tokenizer().decode(prompt.prompt, skip_special_tokens=False)
    assert text_before(prompt, prompt.boundaries.query_start).endswith("Be brief.<|im_end|>\n<|im_start|>user\n")
    assert prompt.boundaries.query_end == len(prompt.prompt) - 1  # nothing is stripped: the next turn keeps it all


def test_assistants_greeting_before_the_first_user_belongs_to_the_system_part():
    greeting = "<|im_start|>assistant\nWelcome.<|im_end|>\n"
    prompt = prepare(templates.DEFAULT_SYSTEM, [SYSTEM, assistant("Welcome."), user("one?")])
    assert text_before(prompt, prompt.boundaries.system_end).endswith(greeting + "<|im_start|>user\n")


def test_conversation_without_a_user_has_no_query():
    prompt = prepare(templates.DEFAULT_SYSTEM, [SYSTEM])
    assert prompt.boundaries.system_end is None
    assert prompt.boundaries.query_start is None


def test_probes_that_fail_drop_their_boundaries_and_nothing_else():
    prompt = prepare(templates.BROKEN, [user("hello")])
    assert prompt.boundaries == Boundaries()
    assert prompt.keep_output is True
    assert byte_tokenizer().decode(prompt.prompt) == "hello"


def test_probe_that_changes_nothing_drops_its_boundary():
    prompt = prepare("{{ messages[-1].role }} speaks", [user("hello")])
    assert prompt.boundaries.system_end is None


def test_refused_conversation_reports_the_templates_error():
    with pytest.raises(TemplateError, match="no such luck"):
        prepare(templates.BROKEN, [user("good day")])
    with pytest.raises(TemplateError, match="does not compile"):
        ChatTemplate("{% if %}")


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        ("'// ' + tool.function.description", "// []"),
        ("tool.function.parameters.properties | length", "0[]"),
        ("tool | tojson", "[]"),
    ],
)
def test_tool_with_only_a_name_gets_empty_parts_if_template_needs_them(shown, wanted):
    source = "{% for tool in tools %}{{ " + shown + " }}[]{% endfor %}{{ messages[0].content }}"
    tool = {"type": "function", "function": {"name": "look"}}
    text = whole(prepare(source, [user("one?")], [tool]))
    assert wanted in text
    assert "description" not in text


def test_template_cannot_leave_its_sandbox():
    with pytest.raises(TemplateError):
        prepare("{{ messages.append(1) }}", [user("hello")])
    with pytest.raises(TemplateError):
        prepare("{{ ''.__class__.__mro__[1].__subclasses__() }}", [user("hello")])


def test_json_in_templates_is_not_escaped():
    prompt = prepare("{{ messages[0].content | tojson }}", [user("<é & 'b'>")])
    assert byte_tokenizer().decode(prompt.prompt) == "\"<é & 'b'>\""


def test_templates_may_tell_the_date_and_break_loops():
    source = "{% for m in messages %}{{ strftime_now('%Y') }}{% break %}{% endfor %}"
    rendered = ChatTemplate(source).render([user("a"), user("b")], datetime(2031, 5, 1), {})
    assert rendered == "2031"


def test_message_beginning_like_its_probe_still_gets_a_boundary():
    for text in ("Quick, why?", "zigzag?", "  Quick", ""):
        prompt = prepare(templates.DEFAULT_SYSTEM, [user(text)])
        assert text_before(prompt, prompt.boundaries.query_start).endswith("<|im_start|>user\n")


@given(st.text("ab"), st.text("ab"))
def test_common_prefix_is_the_naive_one(a, b):
    naive = next((i for i in range(min(len(a), len(b))) if a[i] != b[i]), min(len(a), len(b)))
    assert common_prefix(a, b) == naive
