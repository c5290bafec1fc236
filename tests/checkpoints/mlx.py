"""MLX folders as mlx-lm writes them from Hugging Face checkpoints: names, shapes, and its affine integers.

Facts of each family: `sanitize` in mlx_lm/models/*.py; of the integers: `mlx.core.quantize`.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.gpt_oss import BIAS, BLOCK, E2M1
from tests.checkpoints.quantised import Parts

GROUP = 32
EXPERT = re.compile(r"(.*)\.experts\.\d+\.(\w+)\.weight")
PART_OF_EXPERTS = re.compile(r"(.*\.experts\.)(gate_up|down)_proj(?:_(bias|blocks|scales))?")  # of gpt-oss
CENTRED = re.compile(r"(input_layernorm|post_attention_layernorm|model\.norm|[qk]_norm)\.weight$")
RENAMED: dict[str, dict[str, str]] = {  # by `model_type` or class: patterns, and names of MLX
    "qwen3_5_text": {"^": "language_model."},
    "qwen3_5_moe_text": {"^": "language_model."},
    "nemotron_h": {r"switch_mlp\.up_proj": "switch_mlp.fc1", r"switch_mlp\.down_proj": "switch_mlp.fc2"},
    "BailingMoeV2_5ForCausalLM": {r"mlp\.gate\.weight": "mlp.gate.gate_proj.weight"},
    "bailing_moe_linear": {r"mlp\.gate\.weight": "mlp.gate.gate_proj.weight"},
    "kimi_linear": {
        r"gate\.e_score": "e_score",
        r"block_sparse_moe": "mlp",
        r"switch_mlp\.w1": "switch_mlp.gate_proj",
        r"switch_mlp\.w2": "switch_mlp.down_proj",
        r"switch_mlp\.w3": "switch_mlp.up_proj",
        r"_conv1d": "_conv.conv",
    },
    "granitemoehybrid": {
        r"sparse_moe\.(gate|up|down)_proj": r"sparse_moe.switch_mlp.\1_proj",
        r"sparse_moe\.output_linear": "sparse_moe.switch_mlp.down_proj",
        r"shared_mlp\.(gate|up)_proj": r"mlp.\1_proj",  # of a model without experts
    },
}


def write(plain: Path, folder: Path, bits: int | None = None) -> Path:
    """Write a copy of a checkpoint as an MLX folder, with the weights of products and embeddings in `bits`."""
    shutil.copytree(plain, folder)
    config = json.loads((plain / "config.json").read_text())
    tensors = in_mlx(load_file(plain / "model.safetensors"), config)
    if config.pop("quantization_config", None):
        mode = {"group_size": GROUP, "bits": 4, "mode": "mxfp4"}
        (folder / "config.json").write_text(json.dumps(config | {"quantization": mode, "quantization_config": mode}))
    if bits is not None:
        tensors = {name: part for at, weight in tensors.items() for name, part in quantised(at, weight, bits).items()}
        described = {"group_size": GROUP, "bits": bits, "mode": "affine"}
        described["some.module"] = {"group_size": 64, "bits": 8}  # whatever it is, shapes tell
        (folder / "config.json").write_text(json.dumps(config | {"quantization": described}))
    save(tensors, folder)
    return folder


def save(tensors: Parts, folder: Path) -> None:
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "mlx"},
    )


def in_mlx(tensors: Parts, config: dict[str, Any]) -> Parts:
    """The tensors of a checkpoint by MLX's names, in its shapes."""
    model_type = str(config["model_type"])
    found: Parts = {}
    for name, tensor in stacked(of_gpt_oss(tensors) if model_type == "gpt_oss" else tensors).items():
        if name.endswith("conv1d.weight"):
            tensor = tensor.transpose(1, 2)
        if model_type.startswith(("qwen3_5", "qwen3_next")) and CENTRED.search(name):
            tensor = tensor + 1
        if "kv_b_proj" in name:
            found |= halves(name, tensor, int(str(config["num_attention_heads"])), int(str(config["qk_nope_head_dim"])))
        elif "input_linear" in name and (tensor.dim() == 3 or not config["num_local_experts"]):
            gate_up = zip(("gate", "up"), tensor.chunk(2, -2), strict=True)
            found |= {name.replace("input_linear", f"{half}_proj"): rows for half, rows in gate_up}
        elif "shared_mlp.output_linear" in name and not config["num_local_experts"]:
            found[name.replace("shared_mlp.output_linear", "mlp.down_proj")] = tensor
        elif not name.startswith("mtp."):
            found[name] = tensor
    (of_class,) = config["architectures"]
    for pattern, by in RENAMED.get(of_class, RENAMED.get(model_type, {})).items():
        found = {re.sub(pattern, by, name): tensor for name, tensor in found.items()}
    return found


def stacked(tensors: Parts) -> Parts:
    """Experts that stand one by one as one tensor, those that are stacked by MLX's name."""
    found = {name: tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
    lists: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        if one := EXPERT.fullmatch(name):
            lists.setdefault(f"{one[1]}.switch_mlp.{one[2]}.weight", []).append(tensors[name])
    return found | {name: torch.stack(experts) for name, experts in lists.items()}


def of_gpt_oss(tensors: Parts) -> Parts:
    """Experts as mlx-lm cuts them: gate and up apart, [E, N, K], or words of MXFP4."""
    found: Parts = {}
    for name, tensor in tensors.items():
        at = PART_OF_EXPERTS.fullmatch(name)
        if at is None:
            found[name] = tensor
            continue
        if at[3] is None:
            tensor = tensor.transpose(1, 2)
        elif at[3] == "blocks":
            tensor = tensor.flatten(-2).view(torch.uint32)
        of_gates = {"gate": tensor[:, ::2], "up": tensor[:, 1::2]} if at[2] == "gate_up" else {at[2]: tensor}
        part = at[3] if at[3] in ("bias", "scales") else "weight"
        found |= {f"{at[1]}{half}_proj.{part}": rows for half, rows in of_gates.items()}
    return found


def halves(name: str, tensor: torch.Tensor, heads: int, nope_dim: int) -> Parts:
    keys, values = tensor.unflatten(0, (heads, -1)).tensor_split([nope_dim], 1)
    names = [name.replace("kv_b_proj", half) for half in ("embed_q", "unembed_out")]
    return dict(zip(names, (keys.transpose(1, 2), values), strict=True))


def quantised(at: str, weight: torch.Tensor, bits: int) -> Parts:
    """A weight's integers in words, scales and biases; a tensor that MLX does not quantise as it is."""
    module = at.removesuffix(".weight")
    if not at.endswith(".weight") or "conv" in at or weight.dim() < 2 or weight.shape[-1] % GROUP:
        return {at: weight}
    x = weight.float().unflatten(-1, (-1, GROUP))
    bias, scale = x.amin(-1), ((x.amax(-1) - x.amin(-1)) / (2**bits - 1)).clamp(min=1e-6)
    code = ((x - bias[..., None]) / scale[..., None]).round().clamp(0, 2**bits - 1).flatten(-2)
    parts = {"weight": in_words(code.numpy().astype(np.uint8), bits), "scales": scale, "biases": bias}
    return {f"{module}.{name}": part for name, part in parts.items()}


def in_words(code: np.ndarray, bits: int) -> torch.Tensor:
    """Integers in words of 32 bits, one after the other from the lowest bit."""
    bit = (code[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    byte = np.packbits(bit.reshape(*code.shape[:-1], -1), axis=-1, bitorder="little")
    return torch.from_numpy(byte.view(np.int32).copy()).view(torch.uint32)


def values(parts: Parts, at: str, n_in: int) -> torch.Tensor:
    """The weight of these parts in float32, of `n_in` inputs; bits and groups follow from the shapes."""
    module = at.removesuffix(".weight")
    if f"{module}.scales" not in parts:
        return parts[at]
    if parts[f"{module}.scales"].dtype == torch.uint8:
        return of_mxfp4(parts[at], parts[f"{module}.scales"])
    scale, bias, byte = parts[f"{module}.scales"], parts[f"{module}.biases"], parts[at].view(torch.uint8).numpy()
    bits = 8 * byte.shape[-1] // n_in
    bit = np.unpackbits(byte, axis=-1, bitorder="little").reshape(*byte.shape[:-1], n_in, bits)
    code = torch.from_numpy((bit << np.arange(bits, dtype=np.uint8)).sum(-1)).float()
    return (code.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None] + bias[..., None]).flatten(-2)


def of_mxfp4(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers of words in MXFP4, the first in the lowest bits: sign and number, times a power of two for 32."""
    code = torch.stack([words.view(torch.uint8) & 15, words.view(torch.uint8) >> 4], -1).flatten(-2)
    number = E2M1[(code & 7).long()] * (1 - 2.0 * (code >> 3))
    return (number.unflatten(-1, (-1, BLOCK)) * (scales.float() - BIAS).exp2()[..., None]).flatten(-2)
