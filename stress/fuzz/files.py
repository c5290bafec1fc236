"""Targets for files read at start-up: settings, a checkpoint's config.json, a safetensors file. Only ConfigError and
CheckpointError may be raised."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save

from headwater.cli.settings import effective
from headwater.config import SETTINGS
from headwater.errors import CheckpointError, ConfigError
from headwater.models.files import embedded
from headwater.models.load import read_spec
from headwater.models.tensors import CheckpointTensors
from headwater.setting import parse_bytes
from stress.fuzz.target import Drawn, Target
from tests.gguf_files.writer import SIZES, pack

CONFIG = json.loads((embedded() / "config.json").read_text())


@cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="headwater-fuzz-"))


def settings(data: bytes) -> None:
    """The same bytes as a TOML file, as variables, and as a size."""
    drawn = Drawn(data)
    names = [one.variable for one in SETTINGS]
    environment = {drawn.choice(names): drawn.text(12) for _ in range(drawn.below(4))}
    file = folder() / "settings.toml"
    file.write_bytes(drawn.rest)
    for sources in (({}, environment, None), ({}, {}, file), ({}, environment, file)):
        with suppress(ConfigError):
            effective(*sources)
    with suppress(ConfigError):
        assert parse_bytes(drawn.text(20)) >= 0


VALUES = (
    0, 1, -1, 64, 2**31, 2**70, 0.5, 1e400, True, None, "", "full_attention", [], ["full_attention"],
    ["linear_attention"] * 4, [1], [[]], [{}] * 4, {}, float("nan"), {"rope_theta": -1}, "bfloat16", "float64",
    "qwen3_next", "qwen3_5_moe_text",
)  # fmt: skip


MORE_KEYS = (
    "text_config", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
    "mlp_only_layers", "decoder_sparse_step", "torch_dtype", "partial_rotary_factor", "rope_theta", "rope_type",
    "full_attention_interval", "norm_topk_prob",
)  # fmt: skip


def config(data: bytes) -> None:
    """The embedded model's config.json with some keys replaced or left out, or (one in eight) bytes as they are."""
    drawn = Drawn(data)
    file = folder() / "config.json"
    if drawn.below(8) == 0:
        file.write_bytes(drawn.rest)
    else:
        keys = dict(CONFIG)
        for _ in range(drawn.below(5)):
            name = drawn.choice((*CONFIG, *MORE_KEYS))
            value = drawn.choice(VALUES)
            keys[name] = dict(CONFIG) if name == "text_config" and value == {} else value
            if drawn.below(4) == 0:
                del keys[name]
        file.write_text(json.dumps(keys))
    with suppress(CheckpointError, ConfigError):
        read_spec(folder()).layout(10**9)


def safetensors(data: bytes) -> None:
    path = folder() / "model.safetensors"
    path.write_bytes(data)
    with suppress(CheckpointError):
        tensors = CheckpointTensors(folder(), torch.float32, torch.device("cpu"))
        for name in ("a", "b", "missing"):
            tensors.raw(name, 2, 3)


def gguf(data: bytes) -> None:
    path = folder() / "model.gguf"
    path.write_bytes(data)
    with suppress(CheckpointError, ConfigError):
        read_spec(path).layout(10**9)


SETTINGS_TARGET = Target(
    settings,
    [
        b'\x00memory = "4GiB"\nport = 80\ncors = ["*"]\n',
        b'\x00max-running = 5\n[model]\n"',
        b"\x02\x05\x034GB\x07\x02on",
    ],
    words=[one.name.encode() for one in SETTINGS] + [b"=", b"\n", b"[[", b'"""', b"inf", b"nan", b"GiB", b"1e999"],
)
CONFIG_TARGET = Target(
    config,
    [
        b"\x00" + json.dumps(CONFIG).encode(),
        b"\x01\x03" + bytes(range(12)),
        b"\x01\x01\x18\x10\x01",
        b"\x00[" + b"[" * 99,
    ],
    words=[f'"{name}": '.encode() for name in CONFIG],
)
GGUF_TABLE = {"token_embd.weight": ((8, 32), 0, bytes(1024)), "blk.0.attn_q.weight": ((32, 32), 8, bytes(32 * 34))}
GGUF_TARGET = Target(gguf, [pack(SIZES, GGUF_TABLE)], words=[name.encode() for name in SIZES])
SAFETENSORS = Target(safetensors, [save({"a": torch.zeros(2, 3), "b": torch.zeros(3, 2, dtype=torch.bfloat16)})])
