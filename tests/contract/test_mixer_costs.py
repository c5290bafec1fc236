"""FLOPs of a token in every recurrent mixer, compared with the operations that the reference does."""

import pytest
import torch

from tests.contract.recurrences import MIXERS, Case
from tests.contract.recurrences.case import tokens
from tests.counter import OperationCounter


def one_token(case: Case) -> OperationCounter:
    """Operations on vectors (norms, gates, biases) are not counted: those on states and the convolution's taps are."""
    layer, weights, x_LD = case.layer, case.in_float64(), tokens(1, width=case.layer.hidden).double()
    widest = max(shape[0] for shape in layer.tensors().values()) // case.of.parts
    with torch.no_grad(), OperationCounter(above=widest) as operations:
        case.of.reference(layer, weights, x_LD)
    return operations


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_flops_of_a_token_are_those_that_the_reference_does(mixer: Case) -> None:
    counted = one_token(mixer)
    assert counted.products == 2 * mixer.layer.product_weights
    assert counted.products + counted.others == mixer.layer.flops.linear
