"""Readers of quantised weights in Hugging Face checkpoints, one method a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headwater.config_keys import ConfigKeys
from headwater.models.families.quantised import check_quantisation, quantisation
from headwater.models.quantisation.awq import Awq
from headwater.models.quantisation.compressed import Compressed
from headwater.models.quantisation.fp8 import Fp8
from headwater.models.quantisation.gptq import Gptq
from headwater.models.quantisation.method import Method

METHODS: dict[str, Callable[[ConfigKeys], Method]] = {
    "awq": lambda keys: Awq(),
    "compressed-tensors": Compressed,
    "fp8": Fp8,
    "gptq": Gptq,
}


def method_of(config: dict[str, Any]) -> Method | None:
    """Return the reader of a checkpoint's quantised weights, or None if it has none. Raises CheckpointError."""
    check_quantisation(config)
    described = quantisation(config)
    return None if described is None else METHODS[described["quant_method"]](ConfigKeys(described))
