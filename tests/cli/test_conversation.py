"""A conversation sends its history, keeps answers, and survives errors."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from headwater.cli.chat import Conversation
from headwater.load.endpoint import ServerError
from headwater.load.recorded import read_sessions
from tests.load.openai_server import OpenAiServer, Script, chunk


@pytest.fixture
def talk():
    with OpenAiServer() as server, closing(Conversation(server.url, system="be kind", max_tokens=2)) as conversation:
        yield server, conversation


def said(conversation, text):
    return "".join(piece.text for piece in conversation.say(text))


def test_each_turn_sends_the_whole_conversation(talk):
    server, conversation = talk
    assert said(conversation, "one") == said(conversation, "two") == "w0 w1 "
    first, second = (body["messages"] for body in server.bodies)
    assert first == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "one"}]
    assert second == [*first, {"role": "assistant", "content": "w0 w1 "}, {"role": "user", "content": "two"}]
    assert server.bodies[0]["model"] == "words-1"  # the one that the server lists
    assert conversation.answer.cached_tokens == 3
    assert conversation.ttft >= 0


def test_progress_of_a_prompt_precedes_its_answer(talk):
    server, conversation = talk
    comments = [": progress 3/9\n\n", ": keep-alive\n\n", ": progress 6/9\n\n"]
    server.answer = lambda *_: Script([*comments, chunk("a", "stop")], gap=0.01)
    pieces = [(piece.kind, piece.text) for piece in conversation.say("one")]
    assert pieces == [("progress", "3/9"), ("progress", "6/9"), ("text", "a")]
    assert conversation.answer.text == "a"
    assert server.bodies[0]["stream_options"] == {"include_usage": True, "include_progress": True}


def test_a_retry_asks_the_same_again(talk):
    server, conversation = talk
    with pytest.raises(ServerError, match="nothing was asked"):
        conversation.retry()
    said(conversation, "one")
    said(conversation, "two")
    said(conversation, conversation.retry())
    assert server.bodies[2] == server.bodies[1]


def test_a_failed_turn_is_forgotten_and_can_be_retried(talk):
    server, conversation = talk
    said(conversation, "one")
    before = list(conversation.messages)
    server.answer = lambda *_: Script(status=503, body={"error": {"message": "full up"}})
    with pytest.raises(ServerError, match="full up"):
        said(conversation, "two")
    server.answer = lambda *_: Script([chunk("part"), {"error": {"message": "midway"}}])
    with pytest.raises(ServerError, match="midway"):
        said(conversation, conversation.retry())
    assert conversation.messages == before
    assert conversation.retry() == "two"
    assert conversation.messages == before


def test_stopped_answer_keeps_its_received_text(talk):
    server, conversation = talk
    server.answer = lambda *_: Script([chunk("part "), chunk("more")], hold_after=1)
    pieces = conversation.say("one")
    assert next(pieces).text == "part "
    pieces.close()
    assert conversation.messages == [{"role": "user", "content": "one"}, {"role": "assistant", "content": "part "}]


def test_absent_server_is_reported(talk):
    with OpenAiServer() as server:
        url = server.url
    with closing(Conversation(url)) as conversation, pytest.raises(ServerError, match=url):
        said(conversation, "one")


def test_a_saved_chat_is_recorded_traffic(talk, tmp_path):
    _, conversation = talk
    said(conversation, "one")
    said(conversation, "two")
    path: Path = tmp_path / "mine.jsonl"
    conversation.save(path)
    (session,) = read_sessions(path)
    assert [turn.messages[-1]["content"] for turn in session.turns] == ["one", "two"]
    assert session.turns[0].messages[0]["role"] == "system"
    assert len(json.loads(path.read_text())["messages"]) == 5
