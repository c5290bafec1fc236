"""The trained head of multi-token prediction is the served one, and it learns."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headwater.memory.arena import Arena
from headwater.mixers.batch import StepBatch
from headwater.models.files import embedded
from headwater.models.load import load_model
from training.batches import draw
from training.mtp import DEPTH, MODEL_FILE, TrainedMtp, frozen, loss_of, train, write
from training.recipe import RECIPES
from training.source import Source

LENGTH = 90


@pytest.fixture(scope="module")
def head() -> TrainedMtp:
    """No vector of zeros: what starts at zero is drawn, too."""
    made = TrainedMtp(frozen(embedded()).architecture, torch.float32)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for norm in made.norms:
            norm.normal_(0.0, 0.1, generator=generator)
    return made


def rows(tokens: list[int], positions: list[int]) -> StepBatch:
    """Decoding rows of one sequence, whose pages are the first ones."""
    pages = torch.arange(-(-len(tokens) // 64) + 1)
    return StepBatch(
        token_N=torch.tensor([tokens[at] for at in positions]),
        position_N=torch.tensor(positions),
        slices=(),
        decode_slot_B=torch.zeros(len(positions), dtype=torch.int64),
        decode_tables=tuple(pages[: at // 64 + 1] for at in positions),
        logits_row_R=torch.arange(len(positions)),
        wants_all=True,
    )


def test_served_mtp_head_drafts_like_the_trained_one(head: TrainedMtp, tmp_path: Path) -> None:
    """The first draft of every token, and the later ones of the last."""
    write(head, embedded(), tmp_path / "with-head")
    module = load_model(tmp_path / "with-head", "float32", mtp=True).mtp
    assert module is not None
    tokens = torch.randint(0, 4000, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    body = frozen(embedded())
    body.dtype = torch.float32
    for part in body.parts:
        part.dtype = torch.float32
    with torch.no_grad():
        hidden_BTC = body.hidden(torch.tensor([tokens]))
        trained = list(head.drafts(body, torch.tensor([tokens]), hidden_BTC))
    arena, last = Arena(module.spec, 4), LENGTH - DEPTH  # the last token that has all drafts
    logits, own = module.forward(rows(tokens, list(range(1, last + 1))), arena, hidden_BTC[0, :last])
    torch.testing.assert_close(own, trained[0][0, :last].float(), rtol=0, atol=0.02)  # stored in bfloat16
    assert (logits.argmax(-1) == body.logits(trained[0][0, :last]).argmax(-1)).float().mean() > 0.95
    for depth in range(1, DEPTH):
        _, own = module.forward(rows(tokens, [last + depth]), arena, own[-1:])
        torch.testing.assert_close(own, trained[depth][0, last - 1 : last].float(), rtol=0, atol=0.03)


def test_later_token_changes_no_draft_before_it(head: TrainedMtp) -> None:
    body = frozen(embedded())
    tokens = torch.randint(0, 4000, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    changed = tokens.clone()
    changed[0, 60] += 1
    with torch.no_grad():
        hidden_BTC = body.hidden(tokens)
        before, after = (list(head.drafts(body, ids, hidden_BTC)) for ids in (tokens, changed))
    for depth, (one, other) in enumerate(zip(before, after, strict=True), start=1):
        assert torch.equal(one[:, : 60 - depth], other[:, : 60 - depth])
        assert not torch.equal(one[:, 60 - depth], other[:, 60 - depth])


@pytest.mark.full
def test_head_learns(tmp_path: Path) -> None:
    """The same few sequences over and over, while the model stays as it is."""
    recipe = replace(RECIPES["smoke-head"], cool=0.01)
    batch = draw(recipe, Source.load(embedded() / "tokenizer.json", None), 0)
    body, made = frozen(embedded()), TrainedMtp(frozen(embedded()).architecture)
    (first, _), optimiser = loss_of(made, body, batch, 0.1, 0), torch.optim.AdamW(made.parameters(), 0.003)
    for _ in range(12):
        loss, right = loss_of(made, body, batch, 0.1, 0)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    assert len(right) == DEPTH
    assert loss < 0.8 * first
    assert all(weight.grad is None for weight in body.parameters())


def test_smallest_recipe_runs_to_its_end(tmp_path: Path) -> None:
    recipe = replace(RECIPES["smoke-head"], stages=(replace(RECIPES["smoke-head"].stages[0], steps=2),))
    body = frozen(embedded())
    made = TrainedMtp(body.architecture)
    steps = [step for step, _, _ in train(made, body, recipe, None, embedded() / "tokenizer.json")]
    assert steps == [1, 2]
    write(made, embedded(), tmp_path / "out")
    stored, before = load_file(tmp_path / "out" / MODEL_FILE), load_file(embedded() / MODEL_FILE)
    assert all(torch.equal(stored[name], tensor) for name, tensor in before.items() if not name.startswith("mtp."))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["mtp_num_hidden_layers"] == 1
