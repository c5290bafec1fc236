"""Measures of fidelity, and the prompts that they are taken of."""

import gzip
import json
import math
from pathlib import Path

import pytest
import torch

from headwater.errors import ConfigError
from headwater.evaluate.modes import SEPARATOR
from headwater.lab.fidelity import prompts
from headwater.lab.fidelity.figures import Deviation, Distance, MeanFidelity, Measured, kept_table, means_table
from headwater.lab.fidelity.measures import deviation, distance, divergence
from headwater.lab.fidelity.prompts import Prompt, Prompts, Wanted
from headwater.models.files import embedded
from headwater.models.load import LoadedModel, load_model
from headwater.request import Span
from tests.evaluate.items import LOOK_UP, fields, item


def test_distance_has_a_relative_error_and_an_angle() -> None:
    found = distance(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 0.0]]))
    assert found.error == pytest.approx(4 / 3)
    assert found.degrees == pytest.approx(math.degrees(math.atan2(4, 3)))
    assert distance(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0])) == Distance(1.0, 0.0)
    assert distance(torch.tensor([-1.0]), torch.tensor([1.0])).degrees == pytest.approx(180)


def test_an_angle_of_a_billionth_is_seen() -> None:
    found = distance(torch.tensor([1.0, 1e-9], dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert found.degrees == pytest.approx(math.degrees(1e-9))


def test_equal_tensors_have_distance_zero_and_zeros_are_far() -> None:
    zeros, ones = torch.zeros(3), torch.ones(3)
    assert distance(zeros, zeros) == distance(ones, ones) == Distance(0.0, 0.0)
    assert distance(zeros, ones) == Distance(1.0, 90.0)
    assert distance(ones, zeros) == Distance(math.inf, 90.0)


def test_divergence_is_in_nats_and_of_the_second_from_the_first() -> None:
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
    assert divergence(p.log(), q.log()) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert divergence(p.log() + 7, p.log()) == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ValueError, match="NaN"):
        divergence(torch.tensor([math.nan, 0.0]), p)


def test_deviations_are_means_over_heads_and_over_queries_that_see_the_key() -> None:
    """The prompt is a token of prefix and a segment of four tokens, whose ends are one token long."""
    whole = torch.tril(torch.ones(2, 5, 5)) / torch.arange(1, 6)[None, :, None]
    alone = torch.tril(torch.ones(2, 4, 4)) / torch.arange(1, 5)[None, :, None]
    found = deviation(Prompt((0,) * 5, (Span(1, 5),)), 1, whole, [alone])
    off = [1 / n - 1 / (n + 1) for n in range(1, 5)]  # of every key that the n-th query sees
    assert found.head == pytest.approx(sum(off) / 4)
    assert found.interior == pytest.approx((sum(off[1:]) + sum(off[2:])) / 5)
    assert found.tail == pytest.approx(off[3])


def test_means_leave_out_prompts_without_long_segments() -> None:
    assert Deviation.means([{}, {3: Deviation(1.0, 2.0, 3.0)}, {3: Deviation(3.0, 2.0, 1.0)}]) == {
        3: Deviation(2.0, 2.0, 2.0)
    }
    assert Deviation.means([{}]) == {}
    assert Distance.mean([Distance(1.0, 10.0), Distance(3.0, 20.0)]) == Distance(2.0, 15.0)


def test_kv_distances_are_means_over_prompts_with_reuse() -> None:
    far, none = Distance(1.0, 10.0), Distance(0.0, 0.0)
    some = Measured(100, 40, 0.5, False, {0: far}, {1: {"keys": far}})
    whole = Measured(100, 100, 0.0, True, {0: none}, {1: {"keys": none}})
    found = MeanFidelity.of([some, whole])
    assert (found.anew, found.divergence, found.same_first) == (0.7, 0.25, 0.5)
    assert found.states[0] == Distance(0.5, 5.0)
    assert found.kept[1]["keys"] == far
    assert MeanFidelity.of([whole]).kept[1]["keys"] == none


def test_method_without_reuse_shows_no_keys_and_values() -> None:
    far, none = Distance(1.0, 10.0), Distance(0.0, 0.0)
    some = MeanFidelity.of([Measured(100, 40, 0.5, False, {0: far}, {1: {"keys": far}})])
    whole = MeanFidelity.of([Measured(100, 100, 0.0, True, {0: none}, {1: {"keys": none}})])
    table = kept_table({"fast": some, "w32": whole})
    assert [list(column.cells) for column in table.columns] == [["1, keys"], ["1.00e+00, 10.00°"], ["–"]]


def test_a_model_without_recurrent_layers_has_no_last_state() -> None:
    one = MeanFidelity.of([Measured(100, 40, 0.5, False, {}, {1: {"keys": Distance(1.0, 10.0)}})])
    *_, last = means_table({"fast": one}).columns
    assert list(last.cells) == ["–"]


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
def test_missing_prompts_are_an_error_with_both_numbers(loaded, wanted: Wanted, part: str, monkeypatch) -> None:
    some = [item for item in prompts.read_items(prompts.DEFAULT_TASKS) if item.documents][:9] * 30
    monkeypatch.setattr(prompts, "read_items", lambda path: some)
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
