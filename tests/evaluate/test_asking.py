"""Items asked of a server in several ways, and the columns compared."""

from contextlib import closing

import pytest

from headwater.evaluate.asking import Run
from headwater.evaluate.modes import PAIRED, SINGLE
from headwater.evaluate.server import Server
from headwater.evaluate.summary import Comparison, Summary, about_tokens, most_documents, sliced
from headwater.journal import Journal
from headwater.load.endpoint import ServerError
from tests.evaluate.items import item, scored, tool_item
from tests.load.openai_server import OpenAiServer, Script

ITEMS = [item(group=group, answers=[answer]) for group in (0, 1) for answer in ("Ada", "Bo")]


def reply(text="Ada", cached=0, **message):
    """A chat completion."""
    tokens = {"prompt_tokens": 10, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}}
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": "stop"}
    return {"choices": [choice], "usage": tokens, "headwater": {"reason": "full" if cached else "cold"}}


def remembering(server, body):
    """Knows whether its namespace has seen these messages."""
    earlier = [one for one in server.bodies[:-1] if one.get("cache_salt") == body.get("cache_salt")]
    known = any(one["messages"] == body["messages"] for one in earlier)
    return Script(body=reply(cached=8 if known else 0))


def asked(url, items=ITEMS, modes=SINGLE, **options):
    """The columns of a run."""
    with closing(Server(url, None, None, 20.0)) as server:
        return Run(server, items, **options).asked(modes)


def test_cold_requests_share_no_namespace_and_those_of_prefix_share_one():
    with OpenAiServer(remembering) as fake:
        columns = asked(fake.url, modes=PAIRED)
        salts = [body["cache_salt"] for body in fake.bodies]
    assert list(columns) == ["cold", "prefix, first", "prefix, again"]
    cold, prefix = salts[:4], salts[4:]
    assert len(set(cold)) == 4
    assert len(set(prefix)) == 1
    assert set(prefix).isdisjoint(cold)
    assert [one.answer.cached_tokens for one in columns["cold"]] == [0] * 4
    assert [one.answer.cached_tokens for one in columns["prefix, again"]] == [8] * 4
    assert [one.answer.reason for one in columns["prefix, again"]] == ["full"] * 4


def test_two_runs_share_no_namespace():
    with OpenAiServer(remembering) as fake:
        for _ in range(2):
            asked(fake.url, modes=PAIRED)
        first, second = fake.bodies[:12], fake.bodies[12:]
    assert {body["cache_salt"] for body in first}.isdisjoint(body["cache_salt"] for body in second)


@pytest.mark.parametrize("at_once", [1, 3])
def test_column_keeps_the_files_order_at_any_concurrency(at_once):
    items = [item(group=group, answers=[f"w{group}"], messages=[{"role": "user", "content": f"{group}"}])
             for group in range(6)]  # fmt: skip

    def echo(server, body):
        return Script(body=reply(f"w{body['messages'][0]['content']}"))

    with OpenAiServer(echo) as fake:
        column = asked(fake.url, items, at_once=at_once)["served"]
    assert [one.answer.text for one in column] == [f"w{group}" for group in range(6)]
    assert all(one.score.exact for one in column)


def test_a_request_is_greedy_and_has_the_item_s_tools():
    call = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": '{"code": "K1"}'}}
    with OpenAiServer(lambda *_: Script(body=reply(None, tool_calls=[call]))) as fake:
        (one,) = asked(fake.url, [tool_item()], max_tokens=9)["served"]
    (body,) = fake.bodies
    assert (body["temperature"], body["max_tokens"], body["model"]) == (0, 9, "words-1")
    assert body["tools"][0]["function"]["name"] == "look_up"
    assert "cache_salt" not in body
    assert (one.score.exact, one.score.well_formed) == (1, 1)


def test_refusal_is_an_outcome_only_of_its_item():
    def answer(server, body):
        if len(server.bodies) == 2:
            return Script(status=400, body={"error": {"message": "prompt has 9,000 tokens, the model takes 4,096"}})
        return (
            Script(status=500, body={"error": {"message": "boom"}}) if len(server.bodies) == 3 else Script(body=reply())
        )

    with OpenAiServer(answer) as fake:
        column = asked(fake.url)["served"]
    assert [one.answer.outcome for one in column] == ["ok", "refused", "error", "ok"]
    assert "9,000" in column[1].answer.detail
    assert Summary.of(column, 0).failed == 2
    assert Summary.of(column, 0).exact.mean == 0.25  # of Ada, Bo, Ada, Bo only the first is right


@pytest.mark.parametrize(
    "body",
    [
        {"choices": []},
        {"choices": [None]},
        {"choices": [{"message": None, "logprobs": {"content": [None]}}], "usage": [], "headwater": "?"},
        {"choices": [{"message": {"content": ["?"], "tool_calls": [{"function": {"name": 3}}, None]}}]},
        {"choices": [{}], "usage": {"prompt_tokens": "9", "prompt_tokens_details": {"cached_tokens": "all"}}},
    ],
)
def test_incomplete_answer_is_only_wrong(body):
    with OpenAiServer(lambda *_: Script(body=body)) as fake:
        text, call = asked(fake.url, [item(), tool_item()])["served"]
    assert text.score.exact == call.score.exact == call.score.well_formed == 0
    assert text.answer.text == ""
    assert Summary.of([text, call], 0).cached_tokens is None


def test_absent_server_is_a_fault_before_the_first_request():
    with OpenAiServer() as gone:
        url = gone.url
    with pytest.raises(ServerError, match=url):
        Server(url, None, None, 1.0)


def test_comparison_counts_equal_answers_and_estimates_the_difference():
    cold = [scored(1, 0, "a", logprobs=(-0.5,), cached_tokens=0, prompt_tokens=10),
            scored(0, 1, "b", logprobs=(-0.5,), cached_tokens=0, prompt_tokens=10),
            scored(1, 2, "c", logprobs=(-0.5,), cached_tokens=0, prompt_tokens=10)]  # fmt: skip
    other = [scored(1, 0, "a", logprobs=(-0.5,), cached_tokens=4, prompt_tokens=10),
             scored(0, 1, "b", logprobs=(-0.25,), cached_tokens=5, prompt_tokens=10),
             scored(0, 2, "d", logprobs=(-0.5,), cached_tokens=6, prompt_tokens=10)]  # fmt: skip
    found = Comparison.of(other, cold, 0)
    assert (found.items, found.equal, found.same_bits) == (3, 2, 1)
    assert found.difference.mean == pytest.approx(-1 / 3)
    assert (found.difference.low, found.difference.high) == (-1, 0)
    assert (found.prompt_tokens, found.saved_tokens) == (30, 15)


def test_equal_columns_have_no_difference_to_be_unsure_of():
    column = [scored(float(group % 2), group) for group in range(9)]
    found = Comparison.of(column, column, 0)
    assert (found.equal, found.same_bits, found.saved_tokens) == (9, None, None)
    assert (found.difference.mean, found.difference.low, found.difference.high) == (0, 0, 0)


@pytest.mark.parametrize(
    ("tokens", "near"), [(1, 1), (724, 512), (725, 1024), (1000, 1024), (1448, 1024), (4096, 4096)]
)
def test_lengths_are_grouped_by_the_nearest_power_of_two(tokens, near):
    assert about_tokens(item(tokens=tokens)) == near


@pytest.mark.parametrize(("n", "most"), [(0, 0), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (16, 16), (17, 32)])
def test_document_counts_are_grouped_by_the_next_power_of_two(n, most):
    assert most_documents(item(n_documents=n)) == most


def test_slices_have_kinds_in_their_order_and_numbers_ascending():
    with OpenAiServer(lambda *_: Script(body=reply())) as fake:
        items = [tool_item(group=0), item(group=1, n_documents=16), item(group=2, n_documents=2, kind="absent"),
                 item(group=3)]  # fmt: skip
        slices = sliced(asked(fake.url, items)["served"], 0)
    assert list(slices["kind"]) == ["single", "absent", "tool"]
    assert list(slices["documents"]) == [2, 4, 16]  # upper limits
    assert slices["kind"]["tool"].f1 is None
    assert slices["kind"]["single"].well_formed is None
    assert slices["all"][""].items == 4


def test_two_missing_answers_are_not_equal():
    def column(*outcomes):
        return [scored(0, group, outcome=outcome, detail=outcome) for group, outcome in enumerate(outcomes)]

    found = Comparison.of(column("refused", "ok", "error"), column("refused", "ok", "ok"), 0)
    assert (found.items, found.equal) == (2, 1)
    none = Comparison.of(column("refused"), column("refused"), 0)
    assert (none.items, none.equal) == (0, 0)


def test_answers_of_an_interrupted_run_are_not_requested_again(tmp_path):
    out = tmp_path / "out.json"
    with OpenAiServer(remembering) as fake:
        journal = Journal(out, "settings")
        asked(fake.url, items=ITEMS[:2], modes=PAIRED, journal=journal)
        before = len(fake.bodies)
        reported = []
        columns = asked(fake.url, modes=PAIRED, journal=Journal(out, "settings"), on_answer=reported.append)
        assert len(fake.bodies) == before + 6  # of the second group: two items, three columns
        assert len(reported) == 12  # a progress bar counts kept answers, too
        assert before == 6
        whole = asked(fake.url, modes=PAIRED)
    for name, column in columns.items():
        assert [(one.item, one.score, one.answer.text) for one in column] == [
            (one.item, one.score, one.answer.text) for one in whole[name]
        ]


def test_an_error_is_asked_for_again(tmp_path):
    out = tmp_path / "out.json"
    with OpenAiServer(lambda server, body: Script(status=500, body={"error": {"message": "boom"}})) as fake:
        asked(fake.url, journal=Journal(out, ""))
        assert Journal(out, "").found == 0
