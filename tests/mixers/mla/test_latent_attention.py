"""Latent attention over pages against a plain one, and against itself in other cuts, tables and company."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from headwater.layers.attention import Rotary
from headwater.layers.mla import LatentAttention
from headwater.memory.arena import Arena
from headwater.mixers.linear import Linear
from headwater.mixers.mla import TILE, LatentAttentionMixer
from headwater.mixers.slices import Slice
from headwater.mixers.weights import Weights
from tests.mixers.attention_rig import AttentionRig, spec_of

WIDTH = 96
LENGTH = 600
KIMI = LatentAttention(WIDTH, heads=5, latent=40, nope_dim=24, rope_dim=8, v_dim=24)
FORMS = {
    "kimi": KIMI,
    "rotated": replace(KIMI, rotary=Rotary(8, 1e6)),
    "rotated neighbours": replace(KIMI, heads=4, rotary=Rotary(8, 1e6, neighbours=True), gated=True),
    "compressed queries": replace(KIMI, heads=3, q_latent=20, bias=True, rotary=Rotary(8)),
    "wide values": replace(KIMI, heads=1, v_dim=48),
    "wide keys, many heads": replace(KIMI, heads=9, v_dim=8),
}
BITS = [*((form, "float32") for form in FORMS), ("rotated neighbours", "bfloat16")]


class Rig(AttentionRig):
    """One layer with seeded weights and a poisoned arena."""

    def __init__(self, shape: LatentAttention, dtype: str = "float32", n_pages: int = 64) -> None:
        self.shape, self.dtype = shape, getattr(torch, dtype)
        generator = torch.Generator().manual_seed(0)
        self.weights = {
            name: torch.randn(size, generator=generator) * (2 * size[-1] ** -0.5 if len(size) > 1 else 1.0)
            for name, size in shape.tensors().items()
        }
        self.layer = LatentAttentionMixer(0, shape, Weights(self.weights, self.dtype))
        self.arena = Arena(spec_of(shape, WIDTH, self.dtype), n_pages)
        self.arena.pages.fill_(0xFF)
        self.x = torch.randn(LENGTH, WIDTH, generator=generator).to(self.dtype)

    def plain(self) -> torch.Tensor:
        """The layer's formulas in float64: every head's keys and values, all of them at once."""
        a, w = self.shape, {name: weight.double() for name, weight in self.weights.items()}
        x = self.x.double()

        def product(name: str, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

        def normed(name: str, x: torch.Tensor) -> torch.Tensor:
            return x * (x.square().mean(-1, keepdim=True) + a.norm_eps).rsqrt() * w[f"{name}.weight"]

        q = product("q_b_proj", normed("q_a_layernorm", product("q_a_proj", x))) if a.q_latent else product("q_proj", x)
        q = q.view(LENGTH, a.heads, -1)
        latent, position = product("kv_a_proj_with_mqa", x).split([a.latent, a.rope_dim], -1)
        k, v = product("kv_b_proj", normed("kv_a_layernorm", latent)).view(LENGTH, a.heads, -1).tensor_split([24], -1)
        k = torch.cat([k, self._turned(position[:, None]).expand(-1, a.heads, -1)], -1)
        q = torch.cat([q[..., :24], self._turned(q[..., 24:])], -1)
        score = torch.einsum("qhd,khd->hqk", q, k) * 32**-0.5
        score += torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
        seen = torch.einsum("hqk,khd->qhd", score.softmax(-1), v)
        if a.gated:
            seen = seen * product("g_proj", x).sigmoid()[..., None]
        return product("o_proj", seen.flatten(1))

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """As rotation of complex numbers."""
        rotary = self.shape.rotary
        if rotary is None:
            return x
        half = rotary.dim // 2
        angle = torch.arange(LENGTH)[:, None].double() / rotary.theta ** (torch.arange(half).double() / half)
        pairs = x.unflatten(-1, (half, 2)) if rotary.neighbours else x.unflatten(-1, (2, half)).transpose(-1, -2)
        turns = torch.polar(torch.ones_like(angle), angle)[:, None]
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
        return (turned if rotary.neighbours else turned.transpose(-1, -2)).flatten(-2)


def table(rig: Rig, seed: int = 1) -> torch.Tensor:
    return torch.randperm(rig.arena.n_pages, generator=torch.Generator().manual_seed(seed))[: -(-LENGTH // 64)]


@pytest.mark.parametrize("form", FORMS)
def test_agrees_with_the_formula(form: str) -> None:
    rig = Rig(FORMS[form])
    out = rig.prefill(table(rig), [])
    expected = rig.plain()
    assert (out.double() - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("form", FORMS)
def test_decoding_agrees_with_the_formula(form: str) -> None:
    rig = Rig(FORMS[form])
    pages = table(rig)
    rig.prefill(pages, [], 510)
    expected = rig.plain()
    for position in range(510, 514):
        out = rig.run([], [(position, pages)], rig.x[position : position + 1])
        assert (out[0].double() - expected[position]).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("form", "dtype"), BITS)
def test_cuts_and_pages_change_no_bit(form: str, dtype: str) -> None:
    rig = Rig(FORMS[form], dtype)
    whole = rig.prefill(table(rig), [])
    assert whole.isfinite().all()
    for seed, cuts in enumerate([[512], [64, 576], list(range(64, LENGTH, 64))]):
        rig = Rig(FORMS[form], dtype)
        assert torch.equal(rig.prefill(table(rig, seed), cuts), whole), cuts


def test_only_tokens_are_expanded_and_no_key_after_them_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scratch holds NaN, as after a longer sequence whose keys were not finite."""
    rig, rows, product = Rig(KIMI), list[int](), Linear.__call__
    whole = rig.prefill(table(rig), [])
    for part, width in zip(rig.layer.expanded.scratch(rig.x).of(1024), (KIMI.key_dim, KIMI.v_dim), strict=True):
        part[..., :width] = float("nan")
    monkeypatch.setattr(Linear, "__call__", lambda of, x, n: (rows.append(len(x)), product(of, x, n))[1])
    assert torch.equal(rig.prefill(table(rig), []), whole)
    assert set(rows) == {LENGTH}


@pytest.mark.parametrize(("form", "dtype"), BITS)
def test_company_changes_no_bit(form: str, dtype: str) -> None:
    """Sequences decode by themselves, and among up to ten others and two prompts."""
    lengths = [1, 5, 63, 64, 65, 130, 200, 511, 512, 513]
    alone, rows = [], []
    rig = Rig(FORMS[form], dtype, n_pages=128)
    free = iter(torch.randperm(128, generator=torch.Generator().manual_seed(2)).split(1))
    for i, length in enumerate(lengths):
        pages = torch.cat([next(free) for _ in range(-(-length // 64))])
        if length > 1:
            rig.run([Slice(0, length - 1, 0, 0, pages, 0)], [], rig.x[i : i + length - 1])
        rows.append((length - 1, pages))
        alone.append(rig.run([], [rows[-1]], rig.x[-i - 1][None])[0])
    prompts = [torch.cat([next(free) for _ in range(3)]) for _ in range(2)]
    first = [rig.run([Slice(0, 150, 0, 0, pages, 0)], [], rig.x[i : i + 150]) for i, pages in enumerate(prompts)]
    decoding = torch.stack([rig.x[-i - 1] for i in range(len(rows))])
    for n in (2, 3, TILE, TILE + 1, len(rows)):
        out = rig.run([], rows[-n:][::-1], decoding[-n:].flip(0))
        assert torch.equal(out, torch.stack(alone[-n:][::-1])), n
    both = [Slice(0, 150, 0, 0, prompts[0], 0), Slice(150, 150, 0, 1, prompts[1], 0)]
    out = rig.run(both, rows, torch.cat([rig.x[:150], rig.x[1:151], decoding]))
    assert torch.equal(out, torch.cat([*first, torch.stack(alone)]))


def test_pages_hold_one_row_a_token() -> None:
    rig = Rig(KIMI)
    assert spec_of(KIMI, WIDTH).kv_bytes_per_token == 4 * (40 + 8)
    rig.prefill(table(rig), [])
    row_KX = rig.arena.gather(0, table(rig), 10)[0][:10]
    down = rig.x[:10].double() @ rig.weights["kv_a_proj_with_mqa.weight"].double().T
    assert torch.allclose(row_KX[:, 40:].double(), down[:, 40:], atol=1e-5)
