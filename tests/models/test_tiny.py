"""The embedded default checkpoint: written once, whole, and fit for caching."""

import random
import time
from pathlib import Path

import jinja2
import pytest
import torch

from headwater.models.load import LoadedModel, load_model
from headwater.models.tiny import checkpoint, ensure_default
from headwater.models.tiny.tokenizer import MARKUP, SPECIAL, sayable
from tests import checkpoints
from tests.support import Bench


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_default(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder, "float32")


def render(loaded: LoadedModel, messages: list[dict[str, object]], **options: object) -> str:
    assert loaded.chat_template is not None
    template = jinja2.Environment().from_string(loaded.chat_template)
    return template.render(messages=messages, add_generation_prompt=True, **options)


def test_a_second_call_finds_what_the_first_wrote(folder: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert ensure_default(folder.parent) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "nothing temporary is left"


def test_two_writes_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    again = ensure_default(tmp_path / "not" / "there" / "yet")
    for path in folder.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        ensure_default(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_transformers_reads_it_and_computes_the_same(folder: Path, loaded: LoadedModel) -> None:
    tokens = random.Random(1).choices(sayable(loaded.tokenizer), k=200)
    bench = Bench(loaded.model)
    ours = bench.prefill(bench.sequence(200), tokens)
    with torch.no_grad():
        theirs = checkpoints.oracle(folder)(torch.tensor([tokens])).logits[0]
    assert (ours - theirs).abs().max() < 1e-4


def test_answers_encode_back_to_their_tokens_and_do_not_end(loaded: LoadedModel) -> None:
    tokens = loaded.tokenizer.encode(render(loaded, [{"role": "user", "content": "Which river is long?"}])).ids
    bench = Bench(loaded.model)
    seq = bench.sequence(400)
    answer = bench.greedy(seq, bench.prefill(seq, tokens)[-1], 200)
    assert not set(answer) & set(loaded.eos_token_ids)
    assert loaded.tokenizer.encode(loaded.tokenizer.decode(answer)).ids == answer
    assert len(set(answer)) > 50, "no loop"


def test_every_early_token_matters_late(loaded: LoadedModel) -> None:
    tokens = random.Random(1).choices(sayable(loaded.tokenizer), k=2000)
    bench = Bench(loaded.model, n_pages=80)
    last = bench.step([(bench.sequence(2000), tokens)])
    other = bench.step([(bench.sequence(2000), [*tokens[:5], tokens[5] - 1, *tokens[6:]])])
    assert (last - other).abs().max() > 1e-3


def test_special_tokens_are_one_token_each(loaded: LoadedModel) -> None:
    assert loaded.tokenizer.get_vocab_size() == loaded.spec.vocab_size
    for token in SPECIAL + MARKUP:
        assert len(loaded.tokenizer.encode(token).ids) == 1
    text = "Zürich 東京 🌊 naïve\n\tend"
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text).ids) == text


SYSTEM = {"role": "system", "content": "Be short."}
ASK = {"role": "user", "content": "One?"}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwo."}


def test_a_turn_is_framed(loaded: LoadedModel) -> None:
    assert render(loaded, [SYSTEM, ASK]) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(loaded, [ASK], enable_thinking=True).endswith("<|im_start|>assistant\n<think>\n")
    assert render(loaded, [ASK], enable_thinking=False).endswith("<|im_start|>assistant\n")


def test_an_answer_begins_with_a_space_once(loaded: LoadedModel) -> None:
    spaced = {"role": "assistant", "content": " Two."}
    assert render(loaded, [ASK, spaced]) == render(loaded, [ASK, {"role": "assistant", "content": "Two."}])


def test_reasoning_is_stripped_before_the_last_query_only(loaded: LoadedModel) -> None:
    stripped = render(loaded, [ASK, THOUGHT, ASK])
    assert "hm" not in stripped
    assert "<|im_start|>assistant\n Two.<|im_end|>" in stripped
    assert "<think>\nhm\n</think>\n\n Two." in render(loaded, [ASK, THOUGHT])
    apart = {"role": "assistant", "content": "Two.", "reasoning_content": "hm"}
    assert render(loaded, [ASK, apart]) == render(loaded, [ASK, THOUGHT])


def test_tools_calls_and_results_are_framed(loaded: LoadedModel) -> None:
    tool = {"type": "function", "function": {"name": "depth", "parameters": {}}}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "depth", "arguments": {"at": 3}}}]}
    thinking = call | {"content": "<think>\nhm\n</think>\n\nLet me see."}
    result = {"role": "tool", "content": "7"}
    text = render(loaded, [SYSTEM, ASK, thinking, result, result], tools=[tool])
    assert '"name": "depth"' in text.split("<|im_end|>")[0]
    assert '<tool_call>\n{"name": "depth", "arguments": {"at": 3}}\n</tool_call><|im_end|>' in text
    response = "\n<tool_response>\n7\n</tool_response>"
    assert f"<|im_start|>user{response}{response}<|im_end|>\n" in text
    assert "hm" in text, "a tool's result is not a query"
    assert render(loaded, [ASK, call, result]).count("<|im_start|>user") == 2


def test_it_is_written_in_seconds(tmp_path: Path) -> None:
    start = time.process_time()
    ensure_default(tmp_path)
    assert time.process_time() - start < 10
