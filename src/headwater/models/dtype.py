"""Choice of the data type that a model computes in, and its reason. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwater import machine
from headwater.config_keys import text_config


@dataclass(frozen=True, slots=True)
class ChosenDtype:
    """Name of a data type, and why a model computes in it."""

    name: str
    reason: str


def choose_dtype(config: dict[str, Any], asked: str = "auto", device: str = "cpu") -> ChosenDtype:
    """Choose the data type for the model of a config.json: `asked`, or if that is `auto` the fastest here.

    The choice depends on the processor's features only, so that it is repeatable. Weights stored in float32 are not
    rounded for speed. Raises CheckpointError for a malformed config.
    """
    if asked != "auto":
        return ChosenDtype(asked, f"--dtype {asked}")
    text = text_config(config)
    if text.get("dtype", text.get("torch_dtype")) == "float32":
        return ChosenDtype("float32", "the weights are stored in it")
    if device.partition(":")[0] != "cpu":
        return ChosenDtype("bfloat16", f"the fastest on {device}")
    cpu = machine.cpu()
    if cpu.native_bfloat16:
        return ChosenDtype("bfloat16", f"this CPU multiplies it natively: {', '.join(cpu.of_bfloat16)}")
    return ChosenDtype("float32", "this CPU has no bfloat16 products: no AVX512-BF16, no AMX")
