"""Quantised weights as a config.json describes them: the methods that are read, and their settings that are not.

No torch: a checkpoint that cannot be read is refused before its weights are downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headwater.config_keys import ConfigKeys, text_config
from headwater.errors import CheckpointError
from headwater.spec import FLOAT8, Packed

GPTQ_BITS = (2, 3, 4, 8)
GPTQ_FORMATS = ("gptq", "gptq_v2")
PACKED, INTEGER, FLOAT, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
COMPRESSED_FORMATS = (FLOAT, INTEGER, NAIVE, PACKED)
KEYS = ("quantization_config", "compression_config")  # the second: of older checkpoints of compressed-tensors


def quantisation(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the object that describes quantised weights; None if there is none. Raises CheckpointError."""
    parts = (config, text_config(config))
    described = next((part[key] for part in parts for key in KEYS if part.get(key)), None)
    if described is not None and not isinstance(described, dict):
        raise CheckpointError(f"config.json: key {KEYS[0]!r} is {described!r}, must be an object")
    return described


def check_quantisation(config: dict[str, Any]) -> None:
    """Raise CheckpointError for quantised weights of a method, or with a setting, that is not read."""
    described = quantisation(config)
    if described is None:
        return
    method = described.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise CheckpointError(f"config.json: quantised weights of {method!r} are not one of {', '.join(METHODS)}")
    METHODS[method](ConfigKeys(described))


def packed(config: dict[str, Any], stored: str) -> Packed | None:
    """Return how quantised weights are held; None if there are none.

    `stored` is the dtype of the weights that are not quantised. A scale of 16 bits is held in 32 if it is bfloat16, and
    a zero takes a byte; a scale of float8 is held in 32. All large products are taken to be quantised.
    """
    held = config.get("packed")
    if isinstance(held, Packed):  # of a GGUF file
        return held
    described = quantisation(config)
    if described is None:
        return None
    keys = ConfigKeys(described)
    if described["quant_method"] == "compressed-tensors":
        groups = groups_of(keys)
        keys = ConfigKeys(groups[0].optional("weights") or {} if groups else {})
        bits, group = keys.integer("num_bits", 8), keys.integer("group_size", -1)
        of_group = (0 if keys.flag("symmetric", True) else 1) + (4 if stored == "bfloat16" else 2)
    else:
        bits, group, of_group = keys.integer("bits", 4), keys.integer("group_size", 128), 1 + 2
    if described["quant_method"] == "fp8" or keys.optional("type") == "float":
        block = block_of(keys, "weight_block_size") or block_of(keys, "block_structure")
        group = block[1] if block else keys.integer("group_size", -1)
        return Packed(FLOAT8, 1 + (4 / group if group > 0 else 0))
    return Packed(f"int{bits}", (0.5 if bits <= 4 else 1) + (of_group / group if group > 0 else 0))


def _check_gptq(keys: ConfigKeys) -> None:
    if keys.integer("bits", 4) not in GPTQ_BITS:
        raise CheckpointError(f"config.json: key 'bits' is {keys.integer('bits')}, must be one of {GPTQ_BITS}")
    found = keys.optional("checkpoint_format") or GPTQ_FORMATS[0]
    if found not in GPTQ_FORMATS:
        raise CheckpointError(f"config.json: key 'checkpoint_format' is {found!r}, must be one of {GPTQ_FORMATS}")


def _check_awq(keys: ConfigKeys) -> None:
    keys.require("bits", 4, default=4)
    version = str(keys.optional("version") or "gemm").lower()
    if version != "gemm":
        raise CheckpointError(f"config.json: key 'version' is {version!r}, only 'gemm' is supported")


def _check_fp8(keys: ConfigKeys) -> None:
    keys.require("fmt", "e4m3", default="e4m3")
    block_of(keys, "weight_block_size")


def _check_compressed(keys: ConfigKeys) -> None:
    if keys.optional("transform_config"):
        raise CheckpointError("config.json: key 'transform_config' asks for rotations of weights, which are not read")
    sparse = keys.optional("sparsity_config") or {}
    if sparse.get("format", "dense") != "dense":
        raise CheckpointError(f"config.json: key 'sparsity_config' is {sparse!r}, only 'dense' is supported")
    groups = groups_of(keys)
    of_all = keys.optional("format")
    for name in [group.optional("format") or of_all for group in groups] or [of_all]:
        if name not in COMPRESSED_FORMATS:
            raise CheckpointError(f"config.json: key 'format' is {name!r}, must be one of {COMPRESSED_FORMATS}")
    for group in groups:
        _check_compressed_weights(ConfigKeys(group.optional("weights") or {}))


def _check_compressed_weights(keys: ConfigKeys) -> None:
    bits, kind = keys.integer("num_bits", 8), keys.optional("type") or "int"
    if bits not in (4, 8) or (kind, bits) == ("float", 4):
        raise CheckpointError(f"config.json: weights have {bits} bits of type {kind!r}, must be 4 or 8 of 'int', or 8")
    block_of(keys, "block_structure")


def groups_of(keys: ConfigKeys) -> list[ConfigKeys]:
    """Return the descriptions of groups of modules in a config of compressed-tensors."""
    groups = keys.optional("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(f"config.json: key 'config_groups' is {groups!r}, must be an object of objects")
    return [ConfigKeys(group) for group in groups.values()]


def block_of(keys: ConfigKeys, key: str) -> tuple[int, int] | None:
    """Return outputs and inputs of a block that shares a scale; None if the key is missing. Raises CheckpointError."""
    found = keys.optional(key)
    if found is None:
        return None
    sizes = [int(size) for size in found.split("x")] if isinstance(found, str) else found
    if not isinstance(sizes, list) or [type(n) for n in sizes] != [int, int] or min(sizes) < 1:
        raise CheckpointError(f"config.json: key {key!r} is {found!r}, must be two sizes")
    return sizes[0], sizes[1]


METHODS: dict[str, Callable[[ConfigKeys], None]] = {
    "awq": _check_awq,
    "compressed-tensors": _check_compressed,
    "fp8": _check_fp8,
    "gptq": _check_gptq,
}
