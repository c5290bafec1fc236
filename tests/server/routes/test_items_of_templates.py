"""Items of the Responses API with templates that raise on odd conversations or drop parts of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwater.config import ServeConfig
from headwater.server.app import create_app
from headwater.server.prompt.chat import ChatPrompter
from headwater.server.prompt.template import ChatTemplate
from headwater.server.requests.responses import ResponsesRequest
from tests.server import templates
from tests.server.answer.formats.cases import WRITTEN
from tests.server.client import send_all, send_to
from tests.server.fake_engine import byte_tokenizer

OWN = ("STRICT", "DROPPING", "LINES", "MARKING")
EVERY = [pytest.param(getattr(templates, name), id=name.lower()) for name in OWN] + templates.published()
CASES = Path(__file__).parents[4] / "shared" / "cases"
HI, GO = ({"type": "message", "role": "user", "content": [{"type": "input_text", "text": t}]} for t in ("hi", "go"))
DEVELOPER = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be careful."}]}
PATCH = "*** Begin Patch"


def prompt(source, *items, **fields):
    """Return the text of a request's prompt with a template."""
    prompter = ChatPrompter(byte_tokenizer(), ChatTemplate(source, {"bos_token": "", "eos_token": ""}))
    body = ResponsesRequest(input=list(items), **fields)
    prepared = prompter.prepare(body.conversation(prompter.rules))
    return byte_tokenizer().decode(prepared.prompt, skip_special_tokens=False)


def assert_in_order(text, words):
    places = [text.find(word) for word in words]
    assert -1 not in places, (words, text)
    assert places == sorted(places)


def call(kind, **fields):
    return {"type": kind, "call_id": "c", "status": "completed", **fields}


def result(output, kind="function_call_output"):
    return {"type": kind, "call_id": "c", "output": output}


@pytest.mark.parametrize("source", EVERY)
@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([call("custom_tool_call", name="apply_patch", input=PATCH), result("Done.", "custom_tool_call_output")],
         ["apply_patch", PATCH, "Done."]),
        ([call("local_shell_call", action={"type": "exec", "command": ["ls"]}), result("a.py")],
         ["local_shell", "ls", "a.py"]),
        ([call("shell_call", action={"commands": ["ls"]}),
          result([{"stdout": "a.py", "stderr": "", "outcome": {"exit_code": 2}}], "shell_call_output")],
         ["shell", "ls", "a.py\n[exit code 2]"]),
        ([call("computer_call", action={"type": "wait"}),
          result({"type": "computer_screenshot"}, "computer_call_output")],
         ["computer", "wait", "[computer_screenshot left out]"]),
        ([{"type": "web_search_call", "id": "ws", "action": {"type": "search", "query": "rain"}}],
         ["web_search", "rain", "[result left out]"]),
        ([{"type": "mcp_call", "id": "m", "server_label": "wiki", "name": "ask", "arguments": "{}", "output": "Yes."}],
         ["wiki__ask", "Yes."]),
        ([call("function_call", name="f", arguments='{"path": "zzz'), result(None)], ["f", "zzz"]),
        ([call("function_call", name="f", arguments={"path": "zzz"}), result([])], ["f", "zzz"]),
        ([{"type": "hologram"}], ["hi", "[hologram left out]"]),
        ([{"role": "assistant", "content": []}], ["hi"]),
        ([{"type": "reasoning", "summary": [], "content": None, "encrypted_content": "zz"}], ["hi"]),
    ],
)  # fmt: skip
def test_history_is_shown_by_every_template(source, items, words):
    before, after = prompt(source, HI, *items), prompt(source, HI, *items, GO)
    assert_in_order(before, words)
    assert_in_order(after, [*words, "go"])


@pytest.mark.parametrize("source", EVERY)
def test_first_request_of_codex_has_all_its_texts_in_order(source):
    first = prompt(source, DEVELOPER, HI, GO, instructions="You are an agent.")
    assert_in_order(first, ["You are an agent.\n\nBe careful.", "hi", "go"])
    compacted = {"type": "compaction", "id": "cmp_1", "encrypted_content": "zz"}
    assert_in_order(prompt(source, compacted, GO), ["[compaction left out: its text is encrypted]", "go"])


@pytest.mark.parametrize("source", EVERY)
def test_history_without_a_users_message_is_served(source):
    items = [call("function_call", name="f", arguments="{}"), result("Done.")]
    assert_in_order(prompt(source, *items, instructions="Be brief."), ["Be brief.", "Done."])


@pytest.mark.parametrize("source", EVERY)
@pytest.mark.parametrize("cut", [None, 40])
def test_items_of_an_answer_give_the_same_prompt_whole_and_streamed(engine, source, cut):
    engine.chat_template = source
    engine.script = 'So:\n<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>\nand more.'
    body = {"input": [HI], "max_output_tokens": cut, "tools": [{"type": "function", "name": "f"}]}
    requests = [("POST", "/v1/responses", {"json": body | {"stream": stream}}) for stream in (False, True)]
    whole, streamed = send_all(engine, requests)
    output = whole.json()["output"]
    again = json.loads(streamed.text.strip().split("data: ")[-1])["response"]["output"]
    plain = [
        {"role": "assistant", "content": item["content"][0]["text"]}
        if item["type"] == "message"
        else {**item, "id": None, "status": None}
        for item in output
    ]
    texts = {prompt(source, HI, *items, result("ok"), GO) for items in (output, again, plain)}
    assert len(texts) == 1


@pytest.mark.parametrize(("source", "form"), [
    (templates.STRICT, "qwen_xml"), (templates.DROPPING, "nemotron"), (templates.LINES, "hermes"),
])  # fmt: skip
def test_custom_call_sent_back_continues_the_prompt_as_it_was_generated(engine, source, form):
    engine.chat_template = source
    text = '*** Begin Patch\n+print("</p>", True)\n\n*** End Patch\n'
    written = WRITTEN[form]([("apply_patch", {"input": text})])
    engine.script = f"</think>{written}" if form == "nemotron" else f"I patch.\n\n{written}"
    app = create_app(engine, ServeConfig())
    body = {"input": [HI], "tools": [{"type": "custom", "name": "apply_patch"}]}
    (answer,) = send_to(app, [("POST", "/v1/responses", {"json": body})])
    output = answer.json()["output"]
    assert output[-1]["input"] == text
    items = [HI, *output, result("Done.", "custom_tool_call_output") | {"call_id": output[-1]["call_id"]}]
    send_to(app, [("POST", "/v1/responses", {"json": body | {"input": items}})])
    before, after = (byte_tokenizer().decode(one.prompt, skip_special_tokens=False) for one in engine.seen)
    assert written in after
    assert form == "nemotron" or after.startswith(before + engine.script)


def cases():
    """Return the requests to this API among the shared cases, with their names."""
    files = [CASES / f"{name}.json" for name in ("01_codex", "11", "19", "20", "20b")]
    found = [one for file in files for one in json.loads(file.read_text())]
    return {one["name"]: one["body"] for one in found if one["path"] == "/v1/responses"}


@pytest.mark.skipif(not CASES.exists(), reason="no ../shared here")
@pytest.mark.parametrize("source", EVERY)
def test_shared_cases_are_answered(engine, source):
    engine.chat_template, engine.max_model_len = source, 16_384
    bodies = cases()
    answers = send_all(engine, [("POST", "/v1/responses", {"json": body}) for body in bodies.values()])
    refused = {name: one.text for name, one in zip(bodies, answers, strict=True) if one.status_code != 200}
    assert len(answers) > 15
    # a template without a format of calls cannot be forced to write one
    formless = source == templates.MARKING
    assert list(refused) == (["custom tool required"] if formless else []), refused
