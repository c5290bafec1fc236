"""Random weights make caching visible: text continues and maps back to its tokens, and the past matters."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.models.load import LoadedModel, load_model
from tests import checkpoints
from tests.checkpoints.tokenizer import sayable, train
from tests.support import Bench


@pytest.fixture(scope="module")
def loaded(checkpoint: Callable[[str], Path]) -> LoadedModel:
    return load_model(checkpoint("qwen3_5"), "float32")


def test_the_same_seed_gives_the_same_tokenizer() -> None:
    first, again, other = (train(600, seed) for seed in (1, 1, 2))
    assert first.to_str() == again.to_str()
    assert first.to_str() != other.to_str()
    assert first.get_vocab_size() == 600


def test_answers_encode_back_to_their_tokens_and_do_not_end(loaded: LoadedModel) -> None:
    tokens = loaded.tokenizer.encode("Which river is long?").ids
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


def test_change_to_a_shared_checkpoint_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_TEST_CHECKPOINTS", str(tmp_path))
    folder = checkpoints.of_run("qwen3_5")
    assert checkpoints.changed_in_run() == []
    (folder / "config.json").write_text("{}")
    (folder / "chat_template.jinja").touch()
    files = [str(folder / name) for name in ("chat_template.jinja", "config.json")]
    assert checkpoints.changed_in_run() == files
    assert checkpoints.changed_in_run() == []
