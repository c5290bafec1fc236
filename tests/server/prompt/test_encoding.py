"""Pieces encoded separately give the tokens of the whole text, whatever the text and the tokenizer."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from headwater.server.prompt.encoding import PromptEncoder, encode, entry_bytes, overlap, splitting_tokens
from tests.checkpoints.tokenizer import train
from tests.server.fake_engine import byte_tokenizer


@cache
def trained() -> Tokenizer:
    return train(600, 1)


@cache
def metaspace() -> Tokenizer:
    """Return a tokenizer that puts a space before the text; one of its added tokens absorbs white space."""
    vocabulary = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "ab": 5}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a"), ("a", "b")], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(
        [AddedToken("<|im_start|>", special=True, normalized=False), AddedToken("<s>", special=True, rstrip=True)]
    )
    return tokenizer


TOKENIZERS = (byte_tokenizer, trained, metaspace)
LONG = "<|im_start|>system\n" + "again and again " * 8
TAGS = ("<|im_start|>", "<|im_end|>", "<|im_start", "|>", "<s>", "<think>", LONG)
PARTS = (*TAGS, "user\n", " ", "\n\n", "a", "ab ", "word", "é", "e\u0301", "\u0301", "🙂", "日本", "12", "\ud83d")
texts = st.lists(st.sampled_from(PARTS) | st.text(max_size=4), max_size=12).map("".join)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(data=st.data())
def test_ids_and_ends_are_those_of_the_whole_text(tokenizer, data):
    encoder = PromptEncoder(tokenizer(), capacity=3_000)
    text = ""
    for _ in range(3):  # a text that grows, so that pieces are found again
        text += data.draw(texts)
        whole = encode(tokenizer(), text, add_special_tokens=False)
        encoded = encoder.encode(text)
        assert encoded.ids == tuple(whole.ids)
        assert list(encoded.ends) == [end for _, end in whole.offsets]


def test_splitting_tokens_are_those_unaffected_by_their_neighbours():
    assert splitting_tokens(byte_tokenizer()) == ["<|im_end|>", "<|im_start|>"]
    assert splitting_tokens(metaspace()) == ["<|im_start|>"]
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    for token in ("<a>", "<a><b>", "<c>", "c>d", "word", "«»"):
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    assert splitting_tokens(tokenizer) == ["«»"]
    tokenizer.encode_special_tokens = True
    assert splitting_tokens(tokenizer) == []


def test_overlaps():
    assert overlap("<a>", "<a><b>")
    assert overlap("aba", "aba")
    assert overlap("ab", "bc")
    assert not overlap("<a>", "<a>")
    assert not overlap("<a>", "<b>")


class Counting:
    """Tokenizer that records its inputs."""

    def __init__(self, tokenizer):
        self._tokenizer, self.seen = tokenizer, []

    def encode_batch(self, texts, add_special_tokens):
        self.seen += texts
        return self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


OLD = "<|im_start|>" + "old " * 40
NEW = "<|im_start|>" + "new " * 40


def test_only_text_new_to_its_namespace_is_encoded():
    tokenizer = Counting(byte_tokenizer())
    encoder = PromptEncoder(tokenizer)
    encoder.encode(OLD + OLD + "<|im_start|>.", "mine")
    assert tokenizer.seen == [OLD, "<|im_start|>."]
    tokenizer.seen.clear()
    encoder.encode(OLD + NEW, "mine")
    assert tokenizer.seen == [NEW]
    tokenizer.seen.clear()
    encoder.encode(OLD + NEW, "theirs")
    assert tokenizer.seen == [OLD, NEW]


def test_encoder_cache_stays_within_its_bytes_in_lru_order():
    tokenizer = Counting(byte_tokenizer())
    one = PromptEncoder(byte_tokenizer())
    one.encode(OLD + "<|im_start|>")
    encoder = PromptEncoder(tokenizer, capacity=2 * one.bytes)
    third = "<|im_start|>" + "3rd " * 40
    for text in (OLD, NEW, OLD, third):
        encoder.encode(text + "<|im_start|>")
        assert encoder.bytes == sum(entry_bytes(*entry) for entry in encoder._kept.items()) <= 2 * one.bytes
    tokenizer.seen.clear()
    encoder.encode(OLD + NEW)
    assert tokenizer.seen == [NEW]
    encoder.encode("<|im_start|>" + "x" * 100_000 + "<|im_start|>")
    assert encoder.bytes <= 2 * one.bytes
