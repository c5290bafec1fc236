"""Routed experts against their formula, row by row."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from headwater.layers.feed_forward import CLAMPED_SWIGLU, Experts, Mlp
from headwater.mixers import numerics
from headwater.mixers.feed_forward import DenseMlp, MixtureOfExperts
from headwater.mixers.linear import Linear
from headwater.mixers.numerics import Numerics
from headwater.mixers.weights import Weights

WIDTH = 48
QWEN = Experts(WIDTH, experts=8, per_token=2, intermediate=40, shared=56, shared_gate=True)
DEEPSEEK = Experts(
    WIDTH, 12, 3, 40, shared=56, scores="sigmoid", corrected=True, groups=4, groups_per_token=2, scale=2.5
)
FORMS = {
    "qwen": QWEN,
    "not normalised": replace(QWEN, normalise=False),
    "all experts": replace(QWEN, experts=5, per_token=5),
    "one expert": replace(QWEN, experts=16, per_token=1),
    "none shared": replace(QWEN, shared=0, shared_gate=False),
    "deepseek": DEEPSEEK,
    "one group": replace(DEEPSEEK, groups=1, groups_per_token=1),
    "groups of one": replace(DEEPSEEK, groups=12, groups_per_token=4),
    "epsilon": replace(DEEPSEEK, sum_epsilon=0.3),
    "limits": replace(DEEPSEEK, limit=0.4, shared_limit=0.2),
    "clamped": replace(QWEN, shared=0, shared_gate=False, activation=CLAMPED_SWIGLU, limit=0.8, routed_bias=True),
    "nemotron": replace(DEEPSEEK, groups=1, gated=False, activation="relu2"),
    "latent": replace(DEEPSEEK, groups=1, gated=False, activation="relu2", latent=24, bias=True),
}


def weights_of(shape: Experts) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(size, generator=generator) * (size[-1] ** -0.5 if name.endswith("weight") else 0.3)
        for name, size in shape.tensors().items()
    }


def module(
    shape: Experts, dtype: torch.dtype = torch.float32, kind: type[MixtureOfExperts] = MixtureOfExperts
) -> MixtureOfExperts:
    return kind.of(shape, Weights(weights_of(shape), dtype))


class Plain:
    """The formula in float64, one token at a time."""

    def __init__(self, shape: Experts) -> None:
        self.shape = shape
        self.weights = {name: weight.double() for name, weight in weights_of(shape).items()}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shape, inner = self.shape, x
        if shape.latent:
            inner = self.product("latent_in", x)
        total = sum(weight * self.mlp("experts", inner, expert) for weight, expert in self.chosen(x))
        if shape.latent:
            total = self.product("latent_out", total)
        if shape.shared:
            gate = self.product("shared_expert_gate", x).sigmoid() if shape.shared_gate else 1.0
            total = total + gate * self.mlp("shared_expert", x)
        return total

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def mlp(self, name: str, x: torch.Tensor, expert: int | None = None) -> torch.Tensor:
        def product(which: str, x: torch.Tensor) -> torch.Tensor:
            if expert is None:
                return self.product(f"{name}.{which}", x)
            bias = self.weights[f"{name}.{which}.bias"][expert] if self.shape.routed_bias else 0.0
            return self.weights[f"{name}.{which}.weight"][expert] @ x + bias

        if self.shape.activation == CLAMPED_SWIGLU:
            gate, up, limit = product("gate_proj", x), product("up_proj", x), self.shape.limit
            gate, up = gate.clip(max=limit), up.clip(-limit, limit)
            return product("down_proj", (up + 1) * gate * torch.sigmoid(1.702 * gate))
        if self.shape.gated:
            gate, up = F.silu(product("gate_proj", x)), product("up_proj", x)
            if limit := self.shape.shared_limit if expert is None else self.shape.limit:
                gate, up = gate.minimum(torch.tensor(limit)), up.clip(-limit, limit)
            return product("down_proj", gate * up)
        return product("down_proj", product("up_proj", x).relu() ** 2)

    def chosen(self, x: torch.Tensor) -> list[tuple[float, int]]:
        """(weight, expert), found by sorting."""
        shape, logits = self.shape, self.product("gate", x)
        scores = (logits.sigmoid() if shape.scores == "sigmoid" else logits.softmax(-1)).tolist()
        correction = self.weights["correction"].tolist() if shape.corrected else [0.0] * shape.experts
        rank = [score + more for score, more in zip(scores, correction, strict=True)]
        size = shape.experts // shape.groups
        groups = sorted(
            range(shape.groups), key=lambda g: -sum(sorted(rank[g * size : (g + 1) * size], reverse=True)[:2])
        )
        allowed = [e for e in range(shape.experts) if e // size in groups[: shape.groups_per_token]]
        best = sorted(allowed, key=lambda e: -rank[e])[: shape.per_token]
        total = sum(scores[e] for e in best) + shape.sum_epsilon if shape.normalise else 1.0
        return [(shape.scale * scores[e] / total, e) for e in best]


@pytest.mark.parametrize("form", FORMS)
def test_agrees_with_the_formula(form: str) -> None:
    x = torch.randn(33, WIDTH, generator=torch.Generator().manual_seed(1))
    plain = Plain(FORMS[form])
    expected = torch.stack([plain(row) for row in x.double()])
    assert (module(FORMS[form]).forward(x, 0).double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_the_others(form: str, dtype: torch.dtype) -> None:
    moe = module(FORMS[form], dtype)
    x = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = moe.forward(x, 0)
    for first, last in [(0, 1), (1, 3), (7, 8), (100, 164), (199, 200), (3, 200)]:
        assert torch.equal(moe.forward(x[first:last], 0), whole[first:last]), (first, last)


def test_experts_without_rows_are_left_out() -> None:
    shape = Experts(WIDTH, 64, 1, 8, shared=8)
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    expected = torch.stack([Plain(shape)(row) for row in x.double()])
    assert (module(shape).forward(x, 0).double() - expected).abs().max() < 1e-5


def test_the_correction_chooses_and_does_not_weigh() -> None:
    shape = replace(DEEPSEEK, groups=1, per_token=1, normalise=False, scale=1.0)
    weights = weights_of(shape)
    weights["correction"] = torch.zeros(shape.experts)
    weights["correction"][7] = 10.0
    router = MixtureOfExperts.of(shape, Weights(weights)).router
    x = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(1))
    weight, expert = router.choose(x, 0)
    assert expert.tolist() == [[7]] * 20
    assert torch.allclose(weight[:, 0], (x @ weights["gate.weight"][7]).sigmoid(), atol=1e-6)


@pytest.mark.parametrize(("exact", "shares"), [(False, [0.5, 0.5]), (True, [0.53, 0.47])])
def test_float32_router_keeps_logits_apart_that_bfloat16_rounds(exact: bool, shares: list[float]) -> None:
    shape = replace(QWEN, float32_router=exact)
    weights = weights_of(shape)
    weights["gate.weight"] = F.pad(torch.tensor([64.0, 0.125])[None], (0, WIDTH - 2)).repeat(shape.experts, 1)
    weights["gate.weight"][1:, 1], weights["gate.weight"][2:, 0] = 0.0, 0.0  # logits of 64.125, 64 and 0
    weight, expert = MixtureOfExperts.of(shape, Weights(weights, torch.bfloat16)).router.choose(
        torch.ones(1, WIDTH, dtype=torch.bfloat16), 0
    )
    assert sorted(expert[0].tolist()) == [0, 1]
    assert torch.allclose(weight[0].float(), torch.tensor(shares), atol=2e-3)


def test_scores_that_are_all_zero_make_no_nan() -> None:
    shape = replace(DEEPSEEK, groups=1, groups_per_token=1)
    weights = weights_of(shape)
    weights["gate.weight"] = torch.full_like(weights["gate.weight"], -1e3)
    out = MixtureOfExperts.of(shape, Weights(weights)).forward(torch.ones(3, WIDTH), 0)
    assert out.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_flops_are_those_of_the_experts_that_run(form: str) -> None:
    shape = FORMS[form]
    one = Mlp(shape.latent or WIDTH, shape.intermediate, gated=shape.gated).weights
    shared = Mlp(WIDTH, shape.shared, gated=shape.gated).weights
    around = 2 * WIDTH * shape.latent + WIDTH * shape.experts + WIDTH * shape.shared_gate
    assert shape.expert_weights == one + shape.routed_bias * (2 * shape.intermediate + WIDTH)
    assert shape.flops.linear == 2 * (shape.per_token * one + shared + around)


def in_mode(mode: str, dtype: torch.dtype) -> MixtureOfExperts:
    before = numerics.current()
    numerics.use(Numerics(mode))
    try:
        return module(QWEN, dtype)
    finally:
        numerics.use(before)


def same_beside_prompts(experts: MixtureOfExperts, dtype: torch.dtype, n_prefill: int = 1024) -> bool:
    """Return whether rows are the same apart and together: 1,024 of prompts, and one that decodes and chose as most."""
    x_NC = torch.randn(1025, WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype)
    x_NC[:1000] = x_NC[1024]
    together_NC = experts.forward(x_NC, n_prefill)
    prompts_NC, alone_1C = experts.forward(x_NC[:1024], 1024), experts.forward(x_NC[1024:], 0)
    return torch.equal(together_NC, torch.cat((prompts_NC, alone_1C)))


MODES = pytest.mark.parametrize("mode", ["compiled", "tiled"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@MODES
@DTYPES
def test_decoding_row_has_the_same_bits_when_prompts_choose_its_experts(dtype, mode) -> None:
    assert same_beside_prompts(in_mode(mode, dtype), dtype)


@MODES
@DTYPES
def test_a_decoding_row_that_the_product_of_prompts_computes_is_found(dtype, mode, monkeypatch) -> None:
    """The control: products of many rows have other bits. Tiles keep a decoding row out of them, unless it is lost."""
    experts, product = in_mode(mode, dtype), Linear._side_by_side

    def differing(self: Linear, x_RK: torch.Tensor, *args: object) -> torch.Tensor:
        return product(self, x_RK, *args) * (1 + (len(x_RK) > Numerics().decode_tile))

    monkeypatch.setattr(Linear, "_side_by_side", differing)
    assert same_beside_prompts(experts, dtype) == (mode == "tiled")
    assert not same_beside_prompts(experts, dtype, n_prefill=1025)


def test_rows_of_prompts_and_of_answers_are_apart_in_each_expert(monkeypatch) -> None:
    experts, seen = module(QWEN), []
    forward = DenseMlp.forward
    monkeypatch.setattr(DenseMlp, "forward", lambda self, x, n=0: seen.append((self, len(x), n)) or forward(self, x, n))
    x_NC = torch.randn(40, WIDTH)
    experts.forward(x_NC, 30)
    routed = [(rows, n) for of, rows, n in seen if of is not experts.shared]
    assert (sum(rows for rows, _ in routed), sum(n for _, n in routed)) == (40 * 2, 30 * 2)
