"""Tensors of folders that mlx-lm or mlx-vlm wrote, by the names of Hugging Face checkpoints.

Facts of each family: `sanitize` in mlx_lm/models/*.py of github.com/ml-explore/mlx-lm. Convolutions are [C, K, 1]
instead of [C, 1, K]; experts are stacked; `kv_b_proj` is cut into the keys' part of each head, transposed, and the
values'. A quantised weight is integers in words of 32 bits, `weight`, with `scales` and `biases` of groups; or MXFP4.

H heads, L width of a latent row, N outputs, K inputs, X groups of inputs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from headwater.config_keys import text_config
from headwater.errors import CheckpointError
from headwater.mixers.weights import Stored, values_of
from headwater.models.quantisation import method_of
from headwater.models.tensors import CheckpointTensors

Names = tuple[tuple[str, str], ...]  # patterns of the file's names, and what the checkpoint has instead

EXPERT_NAMES: Names = (
    (r"\.switch_mlp\.(\w+)\.weight$", r".experts.\1"),
    (r"\.switch_mlp\.", ".experts."),  # scales and biases
)
FAMILY_NAMES: dict[str, Names] = {
    "bailing_moe_linear": ((r"\.gate\.gate_proj\.", ".gate."),),
    "bailing_hybrid": ((r"\.gate\.gate_proj\.", ".gate."),),
    "gpt_oss": (
        (r"\.experts\.(\w+_proj)\.weight$", r".experts.\1"),
        (r"\.experts\.(\w+_proj)\.bias$", r".experts.\1_bias"),
    ),
    "granitemoehybrid": (
        (r"\.block_sparse_moe\.experts\.down_proj$", ".block_sparse_moe.output_linear.weight"),
        (r"\.block_sparse_moe\.experts\.down_proj\.", ".block_sparse_moe.output_linear."),
        (r"\.block_sparse_moe\.experts\.", ".experts."),
        (r"\.mlp\.down_proj\.", ".shared_mlp.output_linear."),
        (r"\.mlp\.", "."),
    ),
    "kimi_linear": (
        (r"\.mlp\.(experts|shared_experts|gate)\.", r".block_sparse_moe.\1."),
        (r"\.mlp\.e_score", ".block_sparse_moe.gate.e_score"),
        (r"_conv\.conv\.", "_conv1d."),
    ),
    "nemotron_h": ((r"\.experts\.fc1\b", ".experts.up_proj"), (r"\.experts\.fc2\b", ".experts.down_proj")),
}
HEAD_NAME = (r"^language_model\.lm_head\.", "lm_head.")


class MlxTensors(CheckpointTensors):
    """Tensors of an MLX folder."""

    def __init__(self, folder: Path, config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self._text = text_config(config)
        self._names = (HEAD_NAME, *EXPERT_NAMES, *FAMILY_NAMES.get(self._text["model_type"], ()))
        self._in_file: dict[str, str] = {}
        super().__init__(folder, dtype, device, method_of(config))

    def _locate(self) -> dict[str, Path]:
        files = super()._locate()
        self._in_file = {self._published(name): name for name in files}
        return {name: files[theirs] for name, theirs in self._in_file.items()}

    def _published(self, name: str) -> str:
        for pattern, by in self._names:
            name = re.sub(pattern, by, name)
        return name

    def _name_in_file(self, name: str) -> str:
        return self._in_file[name]

    def __contains__(self, name: str) -> bool:
        return name in self._source or _half(name) in self._source

    def _part(self, name: str, part: str) -> str | None:
        named = name if part == "weight" else f"{name.removesuffix('.weight')}.{part}"
        return named if named in self._source else None

    def stored(self, name: str, *shape: int) -> Stored:
        if name not in self._source and _half(name) in self._source:
            return self._both_halves(name, *shape)
        return super().stored(name, *shape)

    def _both_halves(self, name: str, n_out: int, latent: int) -> torch.Tensor:
        """Join the projections from a latent row to keys without positions and to values, head by head."""
        heads, nope_dim = self._text["num_attention_heads"], self._text["qk_nope_head_dim"]
        keys_HLK = values_of(self.stored(_half(name), heads, latent, nope_dim))
        values_HVL = values_of(
            self.stored(name.replace("kv_b_proj", "unembed_out"), heads, n_out // heads - nope_dim, latent)
        )
        return torch.cat([keys_HLK.transpose(1, 2), values_HVL], 1).flatten(0, 1)

    def _read(self, name: str) -> torch.Tensor:
        tensor = super()._read(name)
        if not name.endswith("conv1d.weight"):
            return tensor
        if tensor.shape[-1] != 1:
            raise CheckpointError(
                f"{self._source[name]}: tensor {name!r} has shape {list(tensor.shape)}, MLX has [channels, taps, 1]: "
                "the file's metadata name MLX, its tensors are another format's; convert the checkpoint again"
            )
        return tensor.transpose(1, 2)


def _half(name: str) -> str:
    """Return the name of the keys' part of `kv_b_proj`; other names as they are."""
    return name.replace("kv_b_proj", "embed_q")
