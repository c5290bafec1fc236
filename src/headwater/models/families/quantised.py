"""Quantised weights as a config.json describes them: the methods that are read, and their settings that are not.

No torch: a checkpoint that cannot be read is refused before its weights are downloaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from headwater.config_keys import ConfigKeys, text_config
from headwater.errors import CheckpointError
from headwater.spec import FLOAT8, Packed

GPTQ_BITS = (2, 3, 4, 8)
GPTQ_FORMATS = ("gptq", "gptq_v2")
PACKED, INTEGER, FLOAT, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
NVFP4, MXFP4, MXFP8, NF4, FP4 = "nvfp4", "mxfp4", "mxfp8", "nf4", "fp4"
COMPRESSED_FORMATS = (FLOAT, INTEGER, NAIVE, PACKED, "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized")
# bytes of a weight: codes, and scales in float16 for 16 inputs, bfloat16 or float32 for 32, float32 for 64 or a row
ELEMENT_BYTES = {NVFP4: 0.5 + 2 / 16, MXFP4: 0.5 + 2 / 32, NF4: 0.5 + 4 / 64, FP4: 0.5 + 4 / 64}
ELEMENT_BYTES |= {MXFP8: 1 + 4 / 32, FLOAT8: 1, "int8": 1}
MODELOPT = {  # algorithms of ModelOpt, and how weights are held; those that differ in activations only are alike
    "FP8": FLOAT8,
    "FP8_PER_CHANNEL_PER_TOKEN": FLOAT8,
    "FP8_PB_WO": FLOAT8,
    "MXFP8": MXFP8,
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "W4A8_NVFP4_FP8": NVFP4,
    "W4A8_MXFP4_FP8": MXFP4,
    "MIXED_PRECISION": NVFP4,  # if modules are not named
}
UNQUANTISED = ("NONE", "UNQUANTIZED")
PACKINGS = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}  # of AutoRound, and whose tensors they have
AFFINE = "affine"
MLX_MODES = (AFFINE, MXFP4)
# the nearest form that is read, for the errors of a method, and of all others
NEAREST = {"mlx": "take a folder that mlx-lm wrote in mode 'affine', of 4 or 8 bits"}
NEAREST |= {"modelopt": "take a checkpoint of NVFP4 or FP8"}
INSTEAD = "take the model in 16 bits, with --weights int4"
MLX_BITS = (2, 3, 4, 5, 6, 8)
# the second: of older checkpoints of compressed-tensors; the third: of older ones of MLX
KEYS = ("quantization_config", "compression_config", "quantization")


def quantisation(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the object that describes quantised weights; None if there is none. Raises CheckpointError."""
    parts = (config, text_config(config))
    described = next((part[key] for part in parts for key in KEYS if part.get(key)), None)
    if described is not None and not isinstance(described, dict):
        raise CheckpointError(f"config.json: key {KEYS[0]!r} is {described!r}, must be an object")
    if described and described.get("quant_method") == "auto-round":
        packing = described.get("packing_format", "auto_round:auto_gptq")
        if packing not in PACKINGS:
            known = f"must be one of {', '.join(PACKINGS)}; {INSTEAD}"
            raise CheckpointError(f"config.json: key 'packing_format' is {packing!r}, {known}")
        return described | {"quant_method": PACKINGS[packing]}
    if described and "quant_method" not in described and "group_size" in described:
        of_modules = (value for value in described.values() if isinstance(value, dict))
        modes = [part.get("mode", AFFINE) for part in (described, *of_modules)]
        return {**described, "quant_method": "mlx", "modes": modes}
    return described


def check_quantisation(config: dict[str, Any]) -> None:
    """Raise CheckpointError for quantised weights of a method, or with a setting, that is not read."""
    described = quantisation(config)
    if described is None:
        return
    method = described.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        known = ", ".join(METHODS)
        raise CheckpointError(f"config.json: quantised weights of {method!r} are not one of {known}; {INSTEAD}")
    try:
        METHODS[method](ConfigKeys(described))
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {NEAREST.get(method, INSTEAD)}") from error


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
    form = _form(keys)
    if form is not None:
        experts_only = described.get("quant_method") == MXFP4 or text_config(config).get("model_type") == "gpt_oss"
        return Packed(FLOAT8 if form == MXFP8 else form, ELEMENT_BYTES[form], experts_only=experts_only)
    if described["quant_method"] == "compressed-tensors":
        groups = groups_of(keys)
        keys = ConfigKeys(groups[0].optional("weights") or {} if groups else {})
        bits, group = keys.integer("num_bits", 8), keys.integer("group_size", -1)
        of_group = (0 if keys.flag("symmetric", True) else 1) + (4 if stored == "bfloat16" else 2)
    else:
        bits, group, of_group = keys.integer("bits", 4), keys.integer("group_size", 128), 1 + 2
    if described["quant_method"] in ("fp8", "fbgemm_fp8") or keys.optional("type") == "float":
        block = block_of(keys, "weight_block_size") or block_of(keys, "block_structure")
        group = block[1] if block else keys.integer("group_size", -1)
        return Packed(FLOAT8, 1 + (4 / group if group > 0 else 0))
    if described["quant_method"] == "mlx":
        of_weight = (0.5 if bits <= 4 else 1) + 8 / group
        return Packed(f"int{bits}", of_weight, of_weight)
    return Packed(f"int{bits}", (0.5 if bits <= 4 else 1) + (of_group / group if group > 0 else 0))


def _form(keys: ConfigKeys) -> str | None:
    """Return the form of most weights if it has one size in all checkpoints, by `ELEMENT_BYTES`."""
    method = keys.optional("quant_method")
    if method == "modelopt":
        named = _algorithms(keys)
        of_experts = [algorithm for name, algorithm in named.items() if ".experts" in name]
        return Counter(MODELOPT[algorithm] for algorithm in of_experts or named.values()).most_common(1)[0][0]
    if method == "compressed-tensors":
        weights = [group.optional("weights") or {} for group in groups_of(keys)]
        of_floats = [f"{w.get('num_bits')}, {w.get('group_size')}" for w in weights if w.get("type") == "float"]
        return {"4, 16": NVFP4, "4, 32": MXFP4, "8, 32": MXFP8}.get(of_floats[0]) if of_floats else None
    if method == "bitsandbytes":
        return "int8" if keys.flag("load_in_8bit", False) else str(keys.optional("bnb_4bit_quant_type") or FP4)
    return MXFP4 if MXFP4 in (method, keys.optional("mode")) else None


def _algorithms(keys: ConfigKeys) -> dict[str, str]:
    """Return the algorithm of each module that ModelOpt names, or the one of all."""
    modules = keys.optional("quantized_layers") or {}
    named = {name: str(module.get("quant_algo")).upper() for name, module in modules.items()}
    quantised = {name: algorithm for name, algorithm in named.items() if algorithm not in UNQUANTISED}
    return quantised or {"": str(keys.optional("quant_algo")).upper()}


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


def _check_modelopt(keys: ConfigKeys) -> None:
    for algorithm in _algorithms(keys).values():
        if algorithm not in MODELOPT:
            raise CheckpointError(f"config.json: ModelOpt's quant_algo {algorithm!r} is not read")


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
    if bits not in (4, 8) or ((kind, bits) == ("float", 4) and keys.optional("group_size") not in (16, 32)):
        raise CheckpointError(
            f"config.json: weights have {bits} bits of type {kind!r}, must be 4 or 8 bits, as floats of 4 in groups of "
            f"16 or 32"
        )
    block_of(keys, "block_structure")


def _check_mlx(keys: ConfigKeys) -> None:
    for mode in keys.listed("modes", []):
        if mode not in MLX_MODES:
            raise CheckpointError(f"config.json: quantised weights of MLX's mode {mode!r} are not read")
    if keys.integer("bits") not in MLX_BITS:
        raise CheckpointError(f"config.json: key 'bits' is {keys.integer('bits')}, must be one of {MLX_BITS}")


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
    "bitsandbytes": lambda keys: None,
    "compressed-tensors": _check_compressed,
    "fbgemm_fp8": lambda keys: None,
    "fp8": _check_fp8,
    "gptq": _check_gptq,
    "mlx": _check_mlx,
    "modelopt": _check_modelopt,
    "mxfp4": lambda keys: None,
}
