"""Prompts of files, of the sample, and cut out of documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.fidelity.prompt import Prompts
from headwater.fidelity.study import Wanted
from headwater.models.embedded import embedded
from headwater.models.load import LoadedModel, load_model
from headwater.quality.ways import SEPARATOR
from tests.quality.items import fields


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(embedded(), "float32")


def texts(loaded: LoadedModel, prompt) -> list[str]:
    """What its segments say."""
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
def test_what_is_no_prompt_is_named(loaded: LoadedModel, tmp_path: Path, line: object) -> None:
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


def test_prompts_without_segments_are_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Nothing is marked here.")
    with pytest.raises(ConfigError, match="1 prompts, 0 of them with segments"):
        Wanted(file).of(loaded)
