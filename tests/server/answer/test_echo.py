"""Echoed prompts with log probabilities, whole and streamed, in OpenAI's form."""

from __future__ import annotations

import json

import pytest
import torch

from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.engine.proof.selfcheck import SelfCheck
from headwater.server.answer.reply import text_of_tokens
from tests.engine.test_detokenizer import metaspace
from tests.engine.test_prompt_scores import reference
from tests.server.client import error, send_all
from tests.server.fake_engine import byte_tokenizer
from tests.server.routes.test_generate import complete

SCORED = {"echo": True, "logprobs": 2, "max_tokens": 0}


def test_scored_prompt_is_its_tokens_with_their_log_probabilities(engine):
    answer = complete(engine, prompt="a🙂b", **SCORED).json()
    (choice,) = answer["choices"]
    told = choice["logprobs"]
    assert choice["text"] == "a🙂b"
    assert choice["finish_reason"] == "length"
    assert len(told["tokens"]) == answer["usage"]["prompt_tokens"] == 6  # the fake's tokens are bytes
    assert told["token_logprobs"] == [None, *[-0.5] * 5]
    assert told["top_logprobs"][0] is None
    assert {len(top) for top in told["top_logprobs"][1:]} == {2}
    assert told["text_offset"] == [0, 1, 2, 2, 2, 2]
    assert answer["usage"]["completion_tokens"] == 0


def test_answer_follows_its_prompt(engine):
    (choice,) = complete(engine, **{**SCORED, "max_tokens": 3}).json()["choices"]
    assert choice["text"] == "abcGr\ufffd"  # only the first byte of ü
    assert choice["logprobs"]["tokens"][:4] == ["a", "b", "c", "G"]
    assert choice["logprobs"]["token_logprobs"] == [None, *[-0.5] * 5]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 5]


def test_streamed_echo_equals_the_whole_answer(engine):
    response = complete(engine, stream=True, prompt=["abc", "🙂"], **{**SCORED, "max_tokens": 2, "n": 2})
    whole = complete(engine, prompt=["abc", "🙂"], **{**SCORED, "max_tokens": 2, "n": 2}).json()["choices"]
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n")[:-2]]
    for choice in whole:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for part in parts if part["logprobs"] for value in part["logprobs"][name]] == values


def test_scored_prompts_reach_the_engine_as_such(engine):
    complete(engine, **SCORED)
    complete(engine, echo=True)
    complete(engine, logprobs=2)
    assert [one.params.prompt_logprobs for one in engine.seen] == [2, None, None]


def test_nothing_is_scored_without_being_asked(engine):
    for fields in ({"echo": True}, {"logprobs": 1}, {}):
        told = error(complete(engine, **{**fields, "max_tokens": 0}))
        assert (told["param"], told["code"]) == ("max_tokens", error(complete(engine, max_tokens=-2))["code"])
    assert engine.seen == []


@pytest.mark.parametrize("text", ["", "naïve 🙂🙂!", "end\n "])
def test_texts_of_tokens_are_the_text(text):
    tokenizer = byte_tokenizer()
    for prompt in (f"<|im_start|>{text}", tokenizer.encode(f"<|im_start|>{text}").ids):
        texts = text_of_tokens(tokenizer, prompt)
        assert len(texts) == len(tokenizer.encode(f"<|im_start|>{text}").ids)
        assert "".join(texts) == f"<|im_start|>{text}"


def test_half_a_character_at_the_end_of_ids_is_shown_as_such():
    assert text_of_tokens(byte_tokenizer(), byte_tokenizer().encode("a🙂").ids[:3]) == ["a", "", "\ufffd"]


def test_texts_of_other_tokenizers_are_theirs():
    ids = metaspace().encode("the cat").ids
    assert "".join(text_of_tokens(metaspace(), ids)) == metaspace().decode(ids)
    assert "".join(text_of_tokens(metaspace(), "the cat")) == "the cat"


def test_prompt_logprobs_over_http_equal_the_models_and_read_no_cache(loaded):
    check, config = SelfCheck(True, None, "compiled"), ServeConfig(memory=300 * loaded.spec.page_bytes)
    engine = Engine.over(loaded, check, config)
    engine.start()
    prompt = [i % 50 + 5 for i in range(200)]
    plain = {"prompt": prompt, "max_tokens": 1}
    bodies = [plain, {**plain, **SCORED}]
    try:
        _, scored = send_all(engine, [("POST", "/v1/completions", {"json": body}) for body in bodies])
    finally:
        engine.stop()
    answer = scored.json()
    told = torch.tensor(answer["choices"][0]["logprobs"]["token_logprobs"][1:])
    expected = reference(loaded, prompt)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert torch.allclose(told, expected, rtol=0, atol=1e-5)
    assert (answer["headwater"]["reason"], answer["headwater"]["cached_tokens"]) == ("prompt_logprobs", 0)
