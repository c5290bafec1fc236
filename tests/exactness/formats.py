"""Formats of weights that the exactness matrix runs with, and checkpoints that have them."""

from pathlib import Path

from headwater.config import WEIGHTS
from tests.checkpoints import checkpoint
from tests.checkpoints.quantised import quantise
from tests.gguf_files.convert import convert

# by name, the case of `tests.checkpoints.quantised`
METHODS = {
    "gptq": "gptq, 4 bits",
    "awq": "awq",
    "compressed-tensors, 4 bits": "packed, 4 bits, symmetric",
    "compressed-tensors, 8 bits": "int8",
    "fp8": "fp8, blocks",
    "gptq, act order": "gptq, act order",
    "nvfp4": "modelopt, nvfp4",
    "nf4": "nf4",
}
# by name, the type of products' tensors, and of some by the end of their names
TYPES: dict[str, tuple[str, dict[str, str]]] = {
    "BF16": ("BF16", {}),
    "F16": ("F16", {}),
    "Q8_0": ("Q8_0", {}),
    "Q4_0": ("Q4_0", {}),
    "Q4_K and others": (
        "Q4_K",
        {"attn_v.weight": "Q6_K", "attn_qkv.weight": "Q5_K", "ffn_down.weight": "Q6_K", "token_embd.weight": "Q8_0"},
    ),
    "Q3_K and others": (
        "Q3_K",
        {"attn_qkv.weight": "IQ4_XS", "ffn_down.weight": "Q2_K", "ffn_up.weight": "MXFP4", "attn_v.weight": "IQ3_S"}
        | {"attn_q.weight": "IQ2_XS", "ssm_out.weight": "IQ3_XXS", "token_embd.weight": "IQ4_NL"},
    ),
}
FORMATS = (*WEIGHTS, *METHODS, *TYPES)


def stored(root: Path, recipe: str, form: str) -> tuple[Path, str]:
    """Return a recipe's checkpoint in a format, written below `root` if it is not there, and its `--weights`."""
    plain = checkpoint(root, recipe)
    if form in WEIGHTS:
        return plain, form
    path = root / f"{recipe} {form}{'.gguf' if form in TYPES else ''}"
    if not path.exists():
        if form in TYPES:
            convert(plain, path, *TYPES[form])
        else:
            quantise(plain, path, METHODS[form])
    return path, "auto"
