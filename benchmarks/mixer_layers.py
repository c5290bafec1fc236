"""Recurrent layers of a medium size, ours and transformers', with random weights. A mixer is one line in LAYERS.

T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.models.bamba.configuration_bamba import BambaConfig
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.jamba.configuration_jamba import JambaConfig
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.minimax.configuration_minimax import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from headwater.layers.gdn import DeltaNet
from headwater.layers.kda import DeltaAttention
from headwater.layers.layer import Layer
from headwater.layers.lightning import Lightning, alibi_slopes
from headwater.layers.mamba import Mamba
from headwater.layers.mamba2 import Mamba2
from headwater.mixers.linear import Linear
from headwater.mixers.recurrent import RecurrentMixer
from headwater.mixers.weights import Weights
from headwater.models.build import RECURRENT

WIDTH = 1024  # of the model
LAYER_TYPE = "linear_attention"


@dataclass(frozen=True)
class Compared:
    """One layer, and what transformers runs for it on a CPU."""

    layer: Any
    goal: float = 0.0  # times as fast as transformers' in prefill
    theirs: Callable[[Any], torch.nn.Module] | None = None  # None: transformers has none

    def ours(self) -> RecurrentMixer[Any]:
        weights = Weights({name: random_weight(name, shape) for name, shape in self.layer.tensors().items()})
        return RECURRENT[type(self.layer)](self.layer, weights)

    def oracle(self) -> torch.nn.Module | None:
        """With random weights. Raises ValueError unless it has as many as ours."""
        if self.theirs is None:
            return None
        torch.manual_seed(0)
        module = self.theirs(self.layer).eval()
        _check_size(self.layer, module)
        for name, parameter in module.named_parameters():
            with torch.no_grad():
                parameter.copy_(random_weight(name, tuple(parameter.shape)))
        return module


def run_oracle(module: torch.nn.Module, x_TD: torch.Tensor) -> object:
    """One sequence through transformers' layer."""
    if isinstance(module, MiniMaxLightningAttention):
        return module(x_TD[None], position_embeddings=None, attention_mask=None)
    return module(x_TD[None])


def products_of(layer: RecurrentMixer[Any] | torch.nn.Module, n_tokens: int) -> Callable[[], object]:
    """Return a function that runs the layer's products with weights, and nothing else."""
    if isinstance(layer, torch.nn.Module):
        inputs = [(part, part.in_features) for part in layer.modules() if isinstance(part, torch.nn.Linear)]
    else:
        inputs = [(part, part.n_in) for part in vars(layer).values() if isinstance(part, Linear)]
    given = [(product, torch.randn(n_tokens, n_in)) for product, n_in in inputs]
    kinds = [(len(x_TK),) if isinstance(product, Linear) else () for product, x_TK in given]  # rows of prompts
    return lambda: [product(x_TK, *kind) for (product, x_TK), kind in zip(given, kinds, strict=True)]


def random_weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Decays of a few tokens to a thousand, and outputs of products about as large as their inputs."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if name.endswith("A_log"):
        return tensor - 3.0
    return 1.0 + 0.1 * tensor if "norm" in name else tensor * shape[-1] ** -0.5


def _check_size(layer: Layer, module: torch.nn.Module) -> None:
    theirs = sum(parameter.numel() for parameter in module.parameters())
    if theirs != layer.weights:
        raise ValueError(f"{layer.kind} has {layer.weights:,} weights, transformers' {theirs:,}")


def _gated_delta_net(layer: DeltaNet) -> torch.nn.Module:
    config = Qwen3_5TextConfig(
        hidden_size=layer.hidden,
        linear_num_key_heads=layer.k_heads,
        linear_num_value_heads=layer.v_heads,
        linear_key_head_dim=layer.k_dim,
        linear_value_head_dim=layer.v_dim,
        linear_conv_kernel_dim=layer.conv,
    )
    return Qwen3_5GatedDeltaNet(config, 0)


def _mamba2(layer: Mamba2) -> torch.nn.Module:
    config = BambaConfig(
        hidden_size=layer.hidden,
        mamba_n_heads=layer.heads,
        mamba_d_head=layer.head_dim,
        mamba_d_state=layer.state,
        mamba_n_groups=layer.groups,
        mamba_d_conv=layer.conv,
        mamba_expand=layer.inner // layer.hidden,
    )
    return BambaMixer(config, 0)


def _delta_attention(layer: DeltaAttention) -> torch.nn.Module:
    config = KimiLinearConfig(
        hidden_size=layer.hidden,
        linear_num_heads=layer.heads,
        linear_head_dim=layer.head_dim,
        linear_conv_kernel_dim=layer.conv,
        num_hidden_layers=1,
        layer_types=[LAYER_TYPE],
    )
    return KimiLinearDeltaAttention(config, 0)


def _mamba(layer: Mamba) -> torch.nn.Module:
    config = JambaConfig(
        hidden_size=layer.hidden,
        mamba_d_state=layer.state,
        mamba_d_conv=layer.conv,
        mamba_expand=layer.inner // layer.hidden,
        mamba_dt_rank=layer.step_rank,
    )
    return JambaMambaMixer(config, 0)


def _lightning(layer: Lightning) -> torch.nn.Module:
    config = MiniMaxConfig(
        hidden_size=layer.hidden,
        num_attention_heads=layer.heads,
        head_dim=layer.head_dim,
        num_hidden_layers=2,
        layer_types=[LAYER_TYPE, LAYER_TYPE],
    )
    return MiniMaxLightningAttention(config, 0)


LAYERS = {
    "Gated DeltaNet": Compared(DeltaNet(WIDTH, 4, 8, 128, 128, 4), 1.3, _gated_delta_net),
    "Mamba-2": Compared(Mamba2(WIDTH, heads=32, head_dim=64, state=128, groups=1, conv=4), 5, _mamba2),
    "KDA": Compared(DeltaAttention(WIDTH, heads=8, head_dim=128, conv=4), 7, _delta_attention),
    "Mamba-1": Compared(Mamba(WIDTH, inner=2048, state=16, conv=4, step_rank=64, normed=True), 3, _mamba),
    "Lightning": Compared(
        Lightning(WIDTH, 8, 128, tuple(alibi_slopes(8)), activated=True, normed=False, by_head=True), 3, _lightning
    ),
}
