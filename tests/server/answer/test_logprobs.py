"""Log probabilities: each token has a name of its own, whatever its bytes, and every number is JSON."""

import json
import math

from headwater.events import TokenEvent, TokenLogprob
from headwater.server.answer.forms import TokenNames, chat_logprobs, completion_logprobs
from tests.engine.test_detokenizer import byte_level, metaspace

IMPOSSIBLE = TokenEvent(1, "a", -math.inf, (TokenLogprob(1, -math.inf), TokenLogprob(2, -0.25)))


def test_no_two_tokens_of_a_byte_level_tokenizer_share_a_name():
    names = TokenNames(byte_level())
    size = byte_level().get_vocab_size()
    assert len({names.name(token) for token in range(size)}) == size
    assert b"".join(names.raw(token) for token in byte_level().encode("naïve 🙂").ids).decode() == "naïve 🙂"


def test_other_tokenizers_name_tokens_by_their_own_decoder():
    assert TokenNames(metaspace()).name(3) == "cat"


def test_impossible_token_has_a_finite_number():
    chat = chat_logprobs(TokenNames(byte_level()), [IMPOSSIBLE])
    completion = completion_logprobs(TokenNames(byte_level()), [IMPOSSIBLE], 0)
    assert chat["content"][0]["logprob"] == completion["token_logprobs"][0] == -9999.0
    assert list(completion["top_logprobs"][0].values()) == [-9999.0, -0.25]
    json.dumps([chat, completion], allow_nan=False)
