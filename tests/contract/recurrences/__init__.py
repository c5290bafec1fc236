"""All kinds of recurrent layers that the contract is held to. A new one is a file here and a line in RECURRENCES."""

from tests.contract.recurrences.case import Case, Recurrence
from tests.contract.recurrences.delta_attention import DELTA_ATTENTION
from tests.contract.recurrences.gated_delta_net import GATED_DELTA_NET
from tests.contract.recurrences.gated_linear_attention import GATED_LINEAR_ATTENTION
from tests.contract.recurrences.lightning import LIGHTNING
from tests.contract.recurrences.mamba import MAMBA
from tests.contract.recurrences.mamba2 import MAMBA2
from tests.contract.recurrences.short_conv import SHORT_CONV

RECURRENCES: dict[str, Recurrence] = {
    "delta_attention": DELTA_ATTENTION,
    "gated_delta_net": GATED_DELTA_NET,
    "gated_linear_attention": GATED_LINEAR_ATTENTION,
    "lightning": LIGHTNING,
    "mamba2": MAMBA2,
    "mamba": MAMBA,
    "short_conv": SHORT_CONV,
}
MIXERS = {
    f"{kind}, {shape}": Case(layer, recurrence)
    for kind, recurrence in RECURRENCES.items()
    for shape, layer in recurrence.shapes.items()
}
EXTREMES = {
    f"{kind} {extreme}": Case(next(iter(recurrence.shapes.values())), recurrence, extreme)
    for kind, recurrence in RECURRENCES.items()
    for extreme in recurrence.extremes
}

__all__ = ["EXTREMES", "MIXERS", "RECURRENCES", "Case", "Recurrence"]
