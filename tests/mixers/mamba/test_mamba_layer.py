"""The Mamba-1 layer against transformers' of Jamba, in one pass: from a cached state transformers continues wrongly."""

from __future__ import annotations

import pytest
import torch
from transformers.models.jamba.configuration_jamba import JambaConfig
from transformers.models.jamba.modeling_jamba import JambaMambaMixer

from headwater.layers.mamba import Mamba
from headwater.mixers.batch import StepBatch
from headwater.mixers.mamba import SelectiveStateSpace
from headwater.mixers.recurrent import LayerState
from headwater.mixers.slices import Slice
from headwater.mixers.weights import Weights

NONE = torch.empty(0, dtype=torch.int64)


def theirs(layer: Mamba) -> JambaMambaMixer:
    torch.manual_seed(0)
    config = JambaConfig(
        hidden_size=layer.hidden,
        mamba_expand=layer.inner // layer.hidden,
        mamba_d_state=layer.state,
        mamba_d_conv=layer.conv,
        mamba_dt_rank=layer.step_rank,
        mamba_conv_bias=layer.conv_bias,
        mamba_proj_bias=layer.bias,
        rms_norm_eps=layer.norm_eps,
    )
    module = JambaMambaMixer(config, 0).eval()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.normal_(1.0 if "norm" in name or name == "D" else 0.0, 0.3)
    return module


@pytest.mark.parametrize(
    "layer",
    [
        Mamba(48, inner=96, state=16, conv=4, step_rank=3, normed=True),
        Mamba(40, inner=120, state=5, conv=3, step_rank=7, conv_bias=False, bias=True, normed=True, norm_eps=1e-4),
    ],
    ids=["as Jamba", "odd, with other biases"],
)
@pytest.mark.parametrize("length", [1, 64, 200])
def test_outputs_are_those_of_transformers(layer: Mamba, length: int) -> None:
    module = theirs(layer)
    mixer = SelectiveStateSpace(layer, Weights(module.state_dict()))
    x_ND = torch.randn(length, layer.hidden)
    shapes = dict(layer.states)
    state = LayerState(torch.zeros(1, *shapes["recurrent"]), torch.zeros(1, *shapes["conv"]))
    batch = StepBatch(NONE, NONE, (Slice(0, length, 0, 0, NONE, 0),), NONE, (), NONE)
    with torch.inference_mode():
        wanted_ND = module(x_ND[None])[0]
        got_ND = mixer.forward(x_ND, batch, state)
    assert (got_ND - wanted_ND).abs().max() < 1e-5 * wanted_ND.abs().max()


def test_inputs_of_the_scan_are_left_as_they_are() -> None:
    layer = Mamba(48, inner=96, state=16, conv=4, step_rank=3, normed=True)
    mixer = SelectiveStateSpace(layer, Weights(theirs(layer).state_dict()))
    mixed_ntC, gates_nt1 = torch.randn(2, 64, 96), torch.ones(2, 64, 1)
    before = mixed_ntC.clone()
    with torch.inference_mode():
        mixer.prepare(mixed_ntC, gates_nt1)
    assert torch.equal(mixed_ntC, before)
