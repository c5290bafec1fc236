"""A run that stops and continues equals one that did not stop."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from training.answers import answers, shares
from training.batches import batches, draw
from training.held_out import held_out
from training.loop import LOG, Training
from training.recipe import RECIPES, Recipe, Stage
from training.source import LABELS, Source
from training.tokenizer import train

RECIPE = replace(RECIPES["smoke"], stages=(Stage(256, 2, 3, RECIPES["smoke"].stages[0].shares),), warm_up=2)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokenizer.json"
    train(examples=30).save(str(path))
    return path


@pytest.fixture
def begin(tokenizer: Path, tmp_path: Path) -> Callable[[str, Recipe], Training]:
    def make(name: str, recipe: Recipe = RECIPE) -> Training:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
        return Training(recipe, folder)

    return make


def test_training_run_continues_where_it_stopped(begin: Callable[..., Training]) -> None:
    whole = begin("whole")
    assert [entry["step"] for entry in whole.run(None)] == [1, 2, 3]
    list(begin("parts").run(None, until=2))
    rest = begin("parts")
    assert rest.step == 2
    assert [entry["step"] for entry in rest.run(None)] == [3]
    for (name, ours), theirs in zip(whole.model.named_parameters(), rest.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=name)
    log = [json.loads(line) for line in (rest.folder / LOG).read_text().splitlines()]
    assert [entry["step"] for entry in log] == [1, 2, 3]


def test_held_out_answers_come_after_each_stage(begin: Callable[..., Training]) -> None:
    stages = tuple(Stage(length, 1, 2, RECIPE.stages[0].shares) for length in (256, 384))
    entries = list(begin("stages", replace(RECIPE, stages=stages)).run(None))
    rows = [[row["length"] for row in entry.get("held_out", ())] for entry in entries]
    assert rows == [[], [256], [], [256, 384]]
    for row in entries[-1]["held_out"]:
        assert {"n_single", "n_two_hop", "n_absent", "n_memory", "n_persona", "n_tool"} <= set(row)


class Oracle(torch.nn.Module):
    """Says what comes next, but for some tokens."""

    def __init__(self, wrong: set[int]) -> None:
        super().__init__()
        self.embed, self.wrong = torch.empty(0), torch.tensor(sorted(wrong))

    def hidden(self, token_BT: torch.Tensor) -> torch.Tensor:
        next_BT = token_BT.roll(-1, 1)
        return torch.where(torch.isin(next_BT, self.wrong), next_BT + 1, next_BT)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(hidden, 5000)


def test_held_out_answers_are_right_if_all_tokens_are(tokenizer: Path) -> None:
    source = Source.load(tokenizer, None)
    calls = {source.tokenizer.token_to_id("<tool_call>")}
    (right,) = held_out(Oracle(set()), source, [512], RECIPE)  # type: ignore[arg-type]
    (without,) = held_out(Oracle(calls), source, [512], RECIPE)  # type: ignore[arg-type]
    assert {name: share for name, share in right.items() if name.startswith("right")} == dict.fromkeys(
        (name for name in right if name.startswith("right")), 1.0
    )
    assert without["right_tool"] < 0.2 < without["right_memory"] == 1.0
    assert {name: n for name, n in without.items() if name.startswith("n_")} == {
        name: n for name, n in right.items() if name.startswith("n_")
    }


def test_batches_that_cannot_be_drawn_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with exit code 1"):
        next(batches(RECIPE, tmp_path / "is not there.json", None, 0))


def test_run_of_another_recipe_is_not_continued(begin: Callable[..., Training]) -> None:
    list(begin("run").run(None, until=1))
    with pytest.raises(ValueError, match=r"hidden 64.* 128"):
        begin("run", replace(RECIPE, hidden=128, heads=2))


def test_loss_on_a_repeated_batch_halves(begin: Callable[..., Training]) -> None:
    """The same few sequences over and over."""
    recipe = replace(RECIPE, stages=(replace(RECIPE.stages[0], steps=30),))
    training = begin("learns", recipe)
    batch = draw(recipe, Source.load(training.folder / "tokenizer.json", None), 0)
    first, *_, last = (training.learn(batch)["loss"] for _ in range(25))
    assert last < 0.5 * first


def test_batch_depends_only_on_its_step_number(tokenizer: Path) -> None:
    source = Source.load(tokenizer, None)
    one, again, other = draw(RECIPE, source, 1), draw(RECIPE, source, 1), draw(RECIPE, source, 2)
    assert torch.equal(one.token_BT, again.token_BT)
    assert torch.equal(one.label_BT, again.label_BT)
    assert not torch.equal(one.token_BT, other.token_BT)


def test_labels_mark_answers_up_to_their_end_token(tokenizer: Path) -> None:
    source = Source.load(tokenizer, None)
    recipe = replace(RECIPE, stages=(replace(RECIPE.stages[0], sequences=8, length=512),))
    batch = draw(recipe, source, 0)
    end = source.tokenizer.token_to_id("<|im_end|>")
    answers = 0
    for token_T, label_T in zip(batch.token_BT.tolist(), batch.label_BT.tolist(), strict=True):
        for at, label in enumerate(label_T[:-1]):
            if LABELS[label] in ("single", "two_hop", "absent") and label_T[at + 1] == 0:
                assert token_T[at] == end
                answers += 1
    assert answers > 5


def test_answer_is_right_if_all_of_it_is() -> None:
    single, absent = LABELS.index("single"), LABELS.index("absent")
    labels = torch.tensor([[0, single, single, 0, single, 0, absent, absent]])
    right = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]], dtype=torch.bool)
    assert shares(answers(labels, right)) == {"n_single": 2, "right_single": 0.5, "n_absent": 1, "right_absent": 1.0}
