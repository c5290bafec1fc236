"""Decoding rows through their experts, in Triton's interpreter: held to what the CPU does, and to their own bits."""

import pytest
import torch

from headwater.mixers.gpu import experts
from headwater.mixers.gpu.experts import ExpertsOnGpu
from tests.mixers.test_moe import FORMS, WIDTH, module

PREFILLED, DECODED = 3, 4


@pytest.mark.parametrize("form", FORMS)
def test_decoding_rows_get_their_experts_among_any_rows(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x_NC = torch.randn(PREFILLED + DECODED, WIDTH, generator=torch.Generator().manual_seed(1))
    wanted_NC = module(FORMS[form]).forward(x_NC, PREFILLED)
    mixture, ran = module(FORMS[form], kind=ExpertsOnGpu), []
    product = experts.routed_product
    monkeypatch.setattr(experts, "routed_product", lambda x, *rest: (ran.append(len(x)), product(x, *rest))[1])
    together_NC = mixture.forward(x_NC, PREFILLED)
    assert set(ran) == {DECODED, DECODED * FORMS[form].per_token}
    assert (together_NC - wanted_NC).abs().max() < 1e-5 * wanted_NC.abs().max()
    assert torch.equal(together_NC[:PREFILLED], wanted_NC[:PREFILLED])
    for i in range(PREFILLED, PREFILLED + DECODED):
        assert torch.equal(mixture.forward(x_NC[i : i + 1], 0)[0], together_NC[i])
