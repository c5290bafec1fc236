"""The trained model and its delta rule, held to the engine's."""

import random
from pathlib import Path

import pytest
import torch

from headwater.mixers.gdn import delta_rule as token_by_token
from headwater.models.families import read_config
from headwater.models.load import load_model
from tests.support import Bench
from training.delta_rule import UnitLowerInverse, delta_rule
from training.export import adopt, export, tensors
from training.model import TrainedHybrid, Weights
from training.recipe import RECIPES
from training.tokenizer import train

LENGTH = 200


@pytest.fixture(scope="module")
def model() -> TrainedHybrid:
    """No vector of zeros: what starts at zero is drawn, too."""
    made = TrainedHybrid.random(read_config(RECIPES["smoke"].config, "float32"), 3, torch.float32)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for part in made.parts:
            assert isinstance(part, Weights)
            for name in ("o_proj.weight", "out_proj.weight", "down_proj.weight"):
                if name in part.names:
                    part[name].normal_(0.0, 0.1, generator=generator)
        for norm in (*made.norms, made.final_norm):
            norm.normal_(0.0, 0.1, generator=generator)
        made.embed.normal_(0.0, 0.5, generator=generator)
    return made


@pytest.fixture(scope="module")
def folder(model: TrainedHybrid, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained")
    train(examples=30).save(str(path / "made.json"))
    export(model, RECIPES["smoke"], path / "made.json", path / "checkpoint", torch.float32)
    return path / "checkpoint"


def test_served_model_has_the_logits_of_the_trained_one(model: TrainedHybrid, folder: Path) -> None:
    tokens = random.Random(5).choices(range(RECIPES["smoke"].vocabulary), k=LENGTH)
    bench = Bench(load_model(folder, "float32").model)
    served = bench.prefill(bench.sequence(LENGTH), tokens)
    with torch.no_grad():
        trained = model.logits(model.hidden(torch.tensor([tokens])))[0]
    assert trained.std() > 0.5
    torch.testing.assert_close(served, trained, rtol=0, atol=1e-4)


def test_sequence_is_independent_of_others_in_its_batch(model: TrainedHybrid) -> None:
    tokens = torch.randint(0, 4096, (2, 70), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        both, alone = model.hidden(tokens), model.hidden(tokens[1:])
    torch.testing.assert_close(both[1:], alone, rtol=1e-5, atol=1e-5)


def test_later_token_changes_nothing_before_it(model: TrainedHybrid) -> None:
    tokens = torch.randint(0, 4096, (1, 130), generator=torch.Generator().manual_seed(7))
    changed = tokens.clone()
    changed[0, 100] += 1
    with torch.no_grad():
        before, after = model.hidden(tokens), model.hidden(changed)
    torch.testing.assert_close(before[:, :100], after[:, :100], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before[:, 100:], after[:, 100:], atol=1e-3)


def test_every_weight_is_learned(model: TrainedHybrid) -> None:
    tokens = torch.randint(0, 4096, (1, 80), generator=torch.Generator().manual_seed(8))
    logits = model.logits(model.hidden(tokens))
    torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().max() > 0, name
    model.zero_grad()


def test_run_can_begin_with_the_weights_of_a_checkpoint(model: TrainedHybrid, folder: Path) -> None:
    other = TrainedHybrid.random(read_config(RECIPES["smoke"].config, "float32"), 9, torch.float32)
    adopt(other, folder)
    for name, tensor in tensors(model).items():
        assert torch.equal(tensors(other)[name], tensor), name


B, H, K, V = 2, 2, 3, 5


def arguments(length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(B, length, H, K), normal(B, length, H, K), normal(B, length, H, V)
    g, beta = -normal(B, length, H).abs(), normal(B, length, H).sigmoid()
    return [x.requires_grad_() for x in (q, k / k.norm(dim=-1, keepdim=True), v, g, beta)]


@pytest.mark.parametrize("length", [1, 4, 5, 11, 16])
def test_outputs_are_those_of_the_recurrence(length: int) -> None:
    given = arguments(length)
    out = delta_rule(*given, chunk=4)
    zero = torch.zeros(H, K, V, dtype=torch.float64)
    expected = torch.stack([token_by_token(*(x[b].detach() for x in given), zero)[0] for b in range(B)])
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [3, 11])
def test_gradients_are_those_of_differences(length: int) -> None:
    assert torch.autograd.gradcheck(lambda *given: delta_rule(*given, chunk=4), arguments(length))


@pytest.mark.parametrize("length", [5, 11])
def test_gradients_are_those_of_the_recurrence(length: int) -> None:
    """The reference, written without assignments in place, differentiated by torch."""
    given = arguments(length)
    weights = torch.randn(B, length, H, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad((delta_rule(*given, chunk=4) * weights).sum(), given)

    q, k, v, g, beta = given
    state = torch.zeros(B, H, K, V, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for t in range(length):
        state = state * g[:, t, :, None, None].exp()
        error = (v[:, t] - (state * k[:, t, ..., None]).sum(2)) * beta[:, t, :, None]
        state = state + k[:, t, ..., None] * error[:, :, None]
        total = total + ((state * q[:, t, ..., None]).sum(2) * weights[:, t]).sum()
    for ours, theirs in zip(grads, torch.autograd.grad(total, given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_inverse_is_differentiated() -> None:
    a = torch.randn(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).tril(-1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: UnitLowerInverse.apply(x.tril(-1)), (a,))
