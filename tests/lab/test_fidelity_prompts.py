"""Prompts of files, of the sample, and cut out of documents."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.evaluate.modes import SEPARATOR
from headwater.lab.fidelity.prompts import Prompts, Wanted
from headwater.models.embedded import embedded
from headwater.models.load import LoadedModel, load_model
from tests.evaluate.items import LOOK_UP, fields, item


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(embedded(), "float32")


def texts(loaded: LoadedModel, prompt) -> list[str]:
    """Decode the segments of a prompt."""
    return [loaded.tokenizer.decode(prompt.tokens[span.start : span.end]).strip() for span in prompt.segments]


def test_a_line_has_documents_and_a_question(loaded: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"lead": "Read.", "documents": ["One is here.", "Two."], "question": "Who?"}, fields()]
    file.write_text("\n".join(map(json.dumps, lines)))
    first, item = Prompts(loaded).read(file)
    assert texts(loaded, first) == ["One is here.", "Two."]
    assert loaded.tokenizer.decode(first.tokens[first.segments[-1].end :]).strip() == "Who?"
    assert sorted(texts(loaded, item)) == ["D1", "D2"]


def test_a_text_has_separators_in_it(loaded: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(f"Read.{SEPARATOR}One is here.{SEPARATOR}Who?")
    (prompt,) = Prompts(loaded).read(file)
    assert texts(loaded, prompt) == ["One is here."]


@pytest.mark.parametrize("line", [{"documents": "one"}, {"question": "Who?"}, ["one"], {"documents": [1]}])
def test_invalid_prompt_is_named(loaded: LoadedModel, tmp_path: Path, line: object) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match=r"prompts\.jsonl, line 1: .*documents"):
        list(Prompts(loaded).read(file))


def test_a_sample_is_the_same_for_the_same_seed(loaded: LoadedModel) -> None:
    maker = Prompts(loaded)
    assert maker.sampled(3, 1, 600) == maker.sampled(3, 1, 600) != maker.sampled(3, 2, 600)
    assert all(prompt.segments and len(prompt.tokens) <= 600 for prompt in maker.sampled(3, 1, 600))


def test_a_prompt_is_cut_into_equal_parts_with_one_token_after_them(loaded: LoadedModel) -> None:
    prompt = Prompts(loaded).cut(512, 4, 0)
    assert len(prompt.tokens) == 513
    assert [(span.start, span.end) for span in prompt.segments] == [(128, 256), (256, 384), (384, 512)]


@pytest.mark.parametrize(
    ("wanted", "part"),
    [
        (Wanted(cut=3, parts=8), "3 tokens cannot be cut into 8 parts"),
        (Wanted(cut=10**9), "documents have [0-9,]+ tokens, to cut 1,000,000,000"),
        (Wanted(longest=5), "have [0-9]+ tokens at least, at most 5"),
        (Wanted(cut=32_768), "a prompt has 32,769 tokens, the model takes 32,768"),
        (Wanted(Path("some.txt"), cut=12), r"prompts are some\.txt and 12 tokens"),
    ],
)
def test_missing_prompts_are_an_error_with_both_numbers(loaded: LoadedModel, wanted: Wanted, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        wanted.prompts(loaded)


def test_as_many_parts_as_tokens_are_segments_of_one(loaded: LoadedModel) -> None:
    assert [(span.start, span.end) for span in Prompts(loaded).cut(3, 3, 0).segments] == [(1, 2), (2, 3)]


def test_a_text_may_be_packed_and_must_be_utf_8(loaded: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt.gz"
    file.write_bytes(gzip.compress(f"Read.{SEPARATOR}One is here.{SEPARATOR}Who?".encode()))
    (prompt,) = Prompts(loaded).read(file)
    assert texts(loaded, prompt) == ["One is here."]
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"prompt\.txt\.gz is not UTF-8"):
        list(Prompts(loaded).read(file))


def test_an_item_s_prompt_has_its_tools(loaded: LoadedModel) -> None:
    maker = Prompts(loaded)
    with_tools, without = (maker.of_item(item(tools=tools), 0) for tools in ([LOOK_UP], None))
    assert "look_up" in loaded.tokenizer.decode(with_tools.tokens)
    assert "look_up" not in loaded.tokenizer.decode(without.tokens)
    assert texts(loaded, with_tools) == texts(loaded, without)


def test_prompts_without_segments_are_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Nothing is marked here.")
    with pytest.raises(ConfigError, match="1 prompts, 0 of them with segments"):
        Wanted(file).prompts(loaded)
