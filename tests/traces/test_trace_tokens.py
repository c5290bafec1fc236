"""Words lose nothing of a text, and a vocabulary's own tokens are those of its model."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import ConfigError
from headwater.traces.tokens import WORD, Remembered, Vocabulary, Words
from tests.server.fake_engine import byte_tokenizer


@given(st.text())
def test_words_are_the_whole_text(text):
    assert "".join(WORD.findall(text)) == text


@given(st.lists(st.text(max_size=4)))
def test_equal_tokens_are_equal_text(texts):
    words = Words()
    made = [tuple(words.of(text)) for text in texts]
    assert len(set(made)) == len(set(texts))


def test_no_text_is_a_mark():
    words = Words()
    texts = [words.of(text) for text in ("begin", "mark", "user", "newline", "end", "\n", "<|im_start|>user\n")]
    marks = {*words.header("user"), *words.footer()}
    assert not marks & {token for text in texts for token in text}
    assert words.header("user") != words.header("assistant")


def test_words_are_about_as_many_as_a_models_tokens():
    assert len(Words().of("The quick brown fox jumps over the lazy dog.")) == 10
    assert len(Words().of("internationalization")) == 3
    assert len(Words().of("1234")) == 4
    assert len(Words().of("x" + " " * 12 + "y")) == 3


def test_a_vocabulary_gives_its_models_tokens(tmp_path):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    by_folder, by_file = Vocabulary(tmp_path), Vocabulary(tmp_path / "tokenizer.json")
    expected = array("i", byte_tokenizer().encode("Grüße").ids)
    assert by_folder.of("Grüße") == by_file.of("Grüße") == expected
    assert by_file.header("user") == array("i", byte_tokenizer().encode("<|im_start|>user\n").ids)
    assert len(by_file.footer()) == 2


def test_file_without_a_tokenizer_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json' holds no tokenizer"):
        Vocabulary(tmp_path)


def test_repeated_text_is_tokenised_once():
    class Counting(Words):
        calls = 0

        def of(self, text):
            self.calls += 1
            return super().of(text)

    counting = Counting()
    remembered = Remembered(counting)
    assert remembered.of("a b") == remembered.of("a b") == Words().of("a b")
    assert counting.calls == 1
