"""Routers of sigmoid scores against transformers', if the scores are so small that the epsilon of their sum matters.

Softmax scores cannot be: the sum of the chosen ones is at least their share of all experts.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwater.mixers import numerics
from headwater.mixers.feed_forward import MixtureOfExperts
from headwater.mixers.numerics import Numerics
from headwater.models.hybrid import FeedForwardFunction
from headwater.models.load import load_model
from tests import checkpoints

SMALL = {"lfm2_moe": -16.0, "kimi_linear": -44.0, "ling": -44.0, "nemotron_h": -44.0}  # logits, of a sum near epsilon


@pytest.fixture(params=["compiled", "tiled"])
def _mode(request: pytest.FixtureRequest) -> Iterator[None]:
    """Experts by kernels, and one by one."""
    before = numerics.current()
    numerics.use(Numerics(request.param))
    yield
    numerics.use(before)


def routed(name: str, folder: Path) -> tuple[MixtureOfExperts, torch.nn.Module]:
    """The first routed layer, and transformers' one."""
    functions = [function for block in load_model(folder).model.blocks for function in block.functions]
    ours = [f.layer for f in functions if isinstance(f, FeedForwardFunction) and isinstance(f.layer, MixtureOfExperts)]
    theirs = [module for module in checkpoints.oracle(folder).modules() if hasattr(module, "experts")]
    return ours[0], theirs[0]


@pytest.mark.usefixtures("_mode")
@pytest.mark.parametrize("name", SMALL)
def test_experts_of_small_scores_have_the_weights_of_transformers(name: str, checkpoint: Callable[[str], Path]) -> None:
    ours, theirs = routed(name, checkpoint(name))
    logits_NE = SMALL[name] + torch.rand(5, ours.router.shape.experts, generator=torch.Generator().manual_seed(0))
    x_NC = logits_NE @ torch.linalg.pinv(theirs.gate.weight.detach()).T
    with torch.no_grad():
        expected_NC = theirs(x_NC[None])[0]
    found_NC, bound = ours.forward(x_NC.clone(), 0), 1e-4 * expected_NC.abs().max()
    assert (found_NC - expected_NC).abs().max() < bound
    router = replace(ours.router, shape=replace(ours.router.shape, sum_epsilon=0.0))
    assert (replace(ours, router=router).forward(x_NC, 0) - expected_NC).abs().max() > 10 * bound, "control"
