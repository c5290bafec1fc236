"""Constraints as vLLM and llama.cpp name them: the constraint in the engine, accepted texts, and refusals."""

import json
import time
from contextlib import suppress

import pytest

from headwater.engine.constraint import ConstraintCompiler
from headwater.errors import ConstraintError
from headwater.server.requests import structured
from headwater.server.requests.structured import MAX_GRAMMAR_CHARACTERS, MAX_RULES, grammar_constraint, regex_constraint
from tests.server import templates
from tests.server.answer.formats.test_grammar import taken
from tests.server.answer.test_tools import NOT_THINKING, THOUGHT, held_to
from tests.server.client import error, send
from tests.server.fake_engine import FakeEngine, byte_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = {CHAT: {"messages": [{"role": "user", "content": "hello"}]}, COMPLETIONS: {"prompt": "abc"}}
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
GBNF = 'root ::= item (", " item)*\nitem ::= [a-c]+ | "\\u00e9"\n'

# fields, an answer that fits, and one whose last character does not
FORMS = {
    "structured json": ({"structured_outputs": {"json": POINT}}, '{"x": 1}', '{"y'),
    "structured json text": ({"structured_outputs": {"json": json.dumps(POINT)}}, '{\n"x": 1}', '{"y'),
    "structured regex": ({"structured_outputs": {"regex": r"^\d/\d$"}}, "1/2", "1."),
    "structured choice": ({"structured_outputs": {"choice": ["yes/no", "maybe?"]}}, "maybe?", "yo"),
    "structured grammar": ({"structured_outputs": {"grammar": GBNF}}, "ab, c, é", "abd"),
    "structured object": ({"structured_outputs": {"json_object": True}}, '{"y": [1]}', "["),
    "guided_json": ({"guided_json": POINT}, '{"x": 1}', '{"y'),
    "guided_regex": ({"guided_regex": "[ab]{2}"}, "ab", "ac"),
    "guided_choice": ({"guided_choice": ["a", "bc"]}, "bc", "bd"),
    "guided_grammar": ({"guided_grammar": 'start: "x" Y\nY: /[0-9]+/\n'}, "x12", "xx"),
    "grammar": ({"grammar": GBNF}, "a", "d"),
    "json_schema": ({"json_schema": POINT}, '{"x": 1}', '{"y'),
}


@pytest.fixture
def engine():
    fake = FakeEngine(script="a", chat_template=templates.REASONING)
    fake.start()
    yield fake
    fake.stop()


def constraint_of(engine, path, **body):
    """Return the constraint that reaches the engine."""
    response = send(engine, "POST", path, json={**PROMPT[path], "max_tokens": 20, **body})
    assert response.status_code == 200, response.text
    return engine.seen[-1].params.constraint


@pytest.mark.parametrize("name", FORMS)
def test_every_form_constrains_completions_and_chats_also_after_reasoning(engine, name):
    fields, good, bad = FORMS[name]
    assert held_to(engine, good, **fields, **NOT_THINKING) == (good, True)
    assert held_to(engine, bad, **fields, **NOT_THINKING)[0] == bad[:-1]
    assert held_to(engine, THOUGHT + good, **fields) == (THOUGHT + good, True)
    assert held_to(engine, THOUGHT + bad, **fields)[0] == THOUGHT + bad[:-1]
    chatted = engine.seen[-3].params.constraint
    assert constraint_of(engine, COMPLETIONS, **fields) == chatted


def test_white_space_may_be_chosen(engine):
    compact = {"structured_outputs": {"json": POINT, "disable_any_whitespace": True}, **NOT_THINKING}
    assert held_to(engine, '{"x":1}', **compact) == ('{"x":1}', True)
    assert held_to(engine, '{"x": 1}', **compact)[0] == '{"x":'
    own = {"guided_json": POINT, "guided_whitespace_pattern": "-?", **NOT_THINKING}
    assert held_to(engine, '{-"x":-1}', **own) == ('{-"x":-1}', True)


@pytest.mark.parametrize("body", [{"grammar": ""}, {"guided_json": None}, {"guided_json_object": False}])
def test_values_that_ask_for_nothing_constrain_nothing(engine, body):
    assert constraint_of(engine, COMPLETIONS, **body) is None
    assert constraint_of(engine, CHAT, **body) is None


@pytest.mark.parametrize("path", PROMPT)
@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"structured_outputs": {}}, "structured_outputs", "none given"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "json and regex"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "string"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "None"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "not permitted"),
        ({"structured_outputs": [1]}, "structured_outputs", "dictionary"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
        ({"guided_choice": [""]}, "guided_choice.0", "at least 1"),
        ({"guided_choice": "ab"}, "guided_choice", "list"),
        ({"guided_json": "{nope"}, "guided_json", "not JSON"),
        ({"guided_json": "[1]"}, "guided_json", "list"),
        ({"guided_regex": "a", "grammar": GBNF}, "grammar", "guided_regex"),
        ({"guided_regex": 3}, "guided_regex", "3"),
        ({"grammar": "hello"}, "grammar", "::="),
        ({"grammar": 'root ::= "a"' + " " * MAX_GRAMMAR_CHARACTERS}, "grammar", f"{MAX_GRAMMAR_CHARACTERS:,}"),
        ({"guided_grammar": "root ::= foo"}, "guided_grammar", "foo"),
        ({"min_tokens": 30}, "min_tokens", "20"),
        ({"min_tokens": -1}, "min_tokens", "-1"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ({"length_penalty": 2}, "length_penalty", "2"),
        ({"n": 2, "best_of": 3}, None, ""),
    ],
)
def test_refusals_name_their_field(engine, path, body, param, words):
    if "best_of" in body:  # of completions only
        path, param, words = COMPLETIONS, "best_of", "3"
    told = error(send(engine, "POST", path, json={**PROMPT[path], "max_tokens": 20, **body}))
    assert told["param"] == param
    assert words in told["message"]
    assert not engine.seen


def test_response_format_is_one_of_the_constraints(engine):
    body = {**PROMPT[CHAT], "response_format": {"type": "json_object"}, "guided_regex": "a"}
    told = error(send(engine, "POST", CHAT, json=body))
    assert (told["param"], "guided_regex" in told["message"]) == ("response_format", True)


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ('root ::= "\\x41" [\\x42-\\u0043] "\\U00000044"', ["ABD", "ACD"]),
        ('root ::= "\\\\u0041" "\\""', ['\\u0041"']),
        ("root ::= [\\x2d\\x5e]", ["-", "^"]),
        ('# comment\nroot ::= a-b{1,2} ("x" |\n "y")?\na-b ::= "\\n" # more\n', ["\n\nx", "\n", "\ny"]),
        ('root ::= "🙂" .', ["🙂é"]),
    ],
)
def test_grammars_in_gbnf_are_converted(source, texts):
    for text in texts:
        assert taken(grammar_constraint(source, {}, "grammar").source, text) == (text, True)


HOSTILE = {
    "open groups": "(" * 30_000,
    "groups": "root ::= " + "(" * 9_000 + '"a"' + ")" * 9_000,
    "backslash": "root ::= \\",
    "surrogate": 'root ::= "\\ud800"',
    "open class": "root ::= [",
    "zero": "\0",
    "rules": "root ::= a\n" + "a ::= b\n" * (MAX_RULES + 1),
    "chain": "root ::= r0\n"
    + "".join(f"r{i} ::= r{i + 1}\n" for i in range(MAX_RULES - 2))
    + f'r{MAX_RULES - 2} ::= "a"',
    "repeats": 'root ::= "a"{5000000000,1}',
    "many": "root ::= a{1000}\na ::= b{1000}\nb ::= [a-z]{1000}",
    "open repeat": 'root ::= "a"{1,',
    "arrow": "::=",
    "circle": "root ::= root",
    "ambiguous": 'root ::= root root | "a" | ',
    "adjacent": "root ::= a b a b\na ::= [xy]* [x] [xy]{20}\nb ::= [xy]* [x] [xy]{20} [z]",
    "lark": "start: A B A B\nA: /(x|y)*x(x|y){20}/\nB: /(x|y)*x(x|y){20}z/",
    "empty": "root ::= [^\\x00-\\U0010ffff]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_or_followed_within_their_limits(name):
    tokenizer = byte_tokenizer()
    compiler = ConstraintCompiler(tokenizer, tokenizer.get_vocab_size(), (tokenizer.token_to_id("<|im_end|>"),))
    started = time.thread_time()
    with suppress(ConstraintError):
        machine = compiler.machine(grammar_constraint(HOSTILE[name], {}, "grammar"))
        for token in tokenizer.encode("xyxyxxyyxy" * 10).ids:
            if not machine.allowed()[token]:
                break
            machine.take(token)
    assert time.thread_time() - started < 3


@pytest.mark.parametrize(
    ("pattern", "bare"),
    [("^a$", "a"), ("a", "a"), (r"a\$", r"a\$"), (r"^a\\$", r"a\\"), ("$", "")],
)
def test_anchors_of_a_whole_match_are_dropped(pattern, bare):
    assert regex_constraint(pattern, {}, "guided_regex").source == bare


def test_each_kind_of_constraint_has_a_maker():
    assert set(structured.MAKERS) == set(structured.FIELDS)
