"""Heads of multi-token prediction, added to checkpoints: transformers has none to save.

A head's blocks are copies of the model's last ones of their kinds; its norms and its product are random.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from headwater.layers.architecture import Block
from headwater.models.load import read_spec
from headwater.spec import ModelSpec

FILE = "model.safetensors"
CONFIG: dict[str, dict[str, Any]] = {"nemotron_h": {"mtp_layers_block_type": ["attention", "moe"]}}  # by model type


def add_head(folder: Path, seed: int = 0) -> None:
    """Add a head to a checkpoint of one file, in the model's dtype."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | CONFIG.get(config["model_type"], {})))
    tensors, spec, generator = load_file(folder / FILE), read_spec(folder), torch.Generator().manual_seed(seed)
    head, width = spec.mtp, spec.hidden_size
    assert head is not None
    prefix = next(prefix for prefix in spec.prefixes if prefix + spec.embedding in tensors)
    dtype = tensors[prefix + spec.embedding].dtype
    for block, like in zip(head.blocks, copied(spec), strict=True):
        tensors[block.norm] = tensors[prefix + like.norm].clone()
        for part, its in zip(block.parts, like.parts, strict=True):
            begin = f"{prefix}{its.at}."
            for name in [name for name in tensors if name.startswith(begin)]:
                tensors[f"{part.at}.{name.removeprefix(begin)}"] = tensors[name].clone()
    for norm in (head.embedding_norm, head.hidden_norm, head.final_norm):
        tensors[norm] = (1 - spec.norm_offset + 0.05 * torch.randn(width, generator=generator)).to(dtype)
    tensors[head.product] = (torch.randn(width, 2 * width, generator=generator) * (2 * width) ** -0.5).to(dtype)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def copied(spec: ModelSpec) -> list[Block]:
    """Return the model's blocks of which its head has copies."""
    assert spec.mtp is not None
    of_head = [[part.layer for part in block.parts] for block in spec.mtp.blocks]
    return [
        next(block for block in reversed(spec.blocks) if [part.layer for part in block.parts] == layers)
        for layers in of_head
    ]
