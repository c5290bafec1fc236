"""Chunked rules and decode steps against the token-by-token ones, where gates, steps and keys are at their extremes.

T tokens, H heads, G heads of keys or groups, K key width, V value width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks import gated_linear_attention as gla
from headwater.mixers import gdn, kda, mamba2
from headwater.mixers.recurrent import decayed_by_channel
from headwater.mixers.slices import CHUNK

CHUNKS = 3
LENGTH = CHUNKS * CHUNK
FLUSHED = torch.finfo(torch.float32).tiny  # smaller numbers are zero, here as in the server
Inputs = tuple[Tensor, ...]  # [T, ...] each
Outputs = tuple[Tensor, Tensor]  # [T, H, V], and a state
Extremes = dict[str, dict[str, float]]


class Rule(NamedTuple):
    """A recurrence in its three forms; `inputs` are random, and keywords bring some of them to an extreme."""

    inputs: Callable[..., Inputs]
    exact: Callable[..., Outputs]  # of inputs and state in float64
    prepare: Callable[..., Any]  # inputs in chunks
    step: Callable[..., Tensor]  # inputs of one token of each sequence, states [B, H, K, V]
    state: tuple[int, int, int]
    parts: tuple[str, ...]  # of prepared chunks
    extremes: Extremes
    idle: dict[str, float]  # inputs that change no state

    def start(self, sequences: int = 1) -> Tensor:
        return torch.randn(sequences, *self.state, generator=torch.Generator().manual_seed(1))

    def chunks(self, given: Inputs) -> Any:
        return self.prepare(*(t.unflatten(0, (CHUNKS, CHUNK)) for t in given))


def randoms(generator: torch.Generator, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, generator=generator) for shape in shapes]


def attending(heads: int, keys: int, values: int, key_heads: int, by_channel: bool, writes: bool) -> Callable[..., Any]:
    """Queries and keys [T, 2, G, K], values, log decays [T, H] or [T, H, K], and writing strengths if it `writes`.

    Keys differ by `spread`. Every seventh token's decays (in every other channel) are `burst` times as strong.
    """

    def inputs(
        gate: float | None = None,
        strength: float | None = None,
        spread: float = 1.0,
        burst: float = 1.0,
        size: float = 1,
    ) -> Inputs:
        generator = torch.Generator().manual_seed(0)
        qk_T2GK, v_THV = randoms(generator, (LENGTH, 2, key_heads, keys), (LENGTH, heads, values))
        qk_T2GK[:, 1] = qk_T2GK[:1, 1] + spread * (qk_T2GK[:, 1] - qk_T2GK[:1, 1])
        g_THX = -torch.rand(LENGTH, heads, *[keys] * by_channel, generator=generator)
        beta_TH = torch.rand(LENGTH, heads, generator=generator)
        g_THX[(slice(None, None, 7), *[slice(None), slice(None, None, 2)] * by_channel)] *= burst
        g_THX = g_THX if gate is None else torch.full_like(g_THX, gate)
        beta_TH = beta_TH if strength is None else torch.full_like(beta_TH, strength)
        return qk_T2GK * size, v_THV, g_THX, *[beta_TH] * writes

    return inputs


def delta_rule(qk_T2GK: Tensor, v_THV: Tensor, g_THX: Tensor, beta_TH: Tensor, state_HKV: Tensor) -> Outputs:
    qk_T2GK = qk_T2GK / (qk_T2GK.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    q_THK, k_THK = qk_T2GK.repeat_interleave(v_THV.shape[1] // qk_T2GK.shape[2], 2).unbind(1)
    return gdn.delta_rule(q_THK * q_THK.shape[-1] ** -0.5, k_THK, v_THV, g_THX, beta_TH, state_HKV)


def gated(qk_T2HK: Tensor, v_THV: Tensor, g_THK: Tensor, state_HKV: Tensor) -> Outputs:
    return decayed_by_channel(qk_T2HK[:, 0] * qk_T2HK.shape[-1] ** -0.5, qk_T2HK[:, 1], v_THV, g_THK, state_HKV)


FORGETTING: Extremes = {
    "ordinary": {},
    "state forgotten at once": {"gate": -200.0},
    "forgetting in bursts": {"burst": 300.0},
    "nothing forgotten": {"gate": 0.0},
    "next to nothing forgotten": {"gate": -1e-7},
}
BY_CHANNEL: Extremes = FORGETTING | {
    "sums of decays below all floats": {"gate": -3e38},
    "forgetting in bursts far stronger than what is between": {"burst": 1e30},
}
WRITING: Extremes = {
    "nothing written": {"strength": 0.0},
    "overwritten": {"strength": 1.0},
    "overwritten and kept": {"strength": 1.0, "gate": 0.0},
    "keys almost equal": {"spread": 1e-3, "strength": 1.0, "gate": 0.0},
    "keys equal": {"spread": 0.0, "strength": 1.0, "gate": -1e-3},
}
OF_DELTA_RULES = ("read_MRK", "value_MtV", "inverse_Mtt", "attend_Mtt", "write_MtK", "decay_MX1")


def gated_delta_net() -> Rule:
    def step(qk_B2GK: Tensor, v_BHV: Tensor, g_BH: Tensor, beta_BH: Tensor, state_BHKV: Tensor) -> Tensor:
        return gdn.decode_step(qk_B2GK, v_BHV, g_BH.unsqueeze(-1), beta_BH, state_BHKV)

    extremes = FORGETTING | {"sums of decays far below the smallest exponent": {"gate": -1e30}} | WRITING
    inputs, idle = attending(4, 32, 32, 2, False, True), {"gate": 0.0, "strength": 0.0}
    return Rule(inputs, delta_rule, gdn.prepare, step, (4, 32, 32), OF_DELTA_RULES, extremes, idle)


def kimi_delta_attention(heads: int = 3, width: int = 32) -> Rule:
    inputs, idle = attending(heads, width, width, heads, True, True), {"gate": 0.0, "strength": 0.0}
    state, extremes = (heads, width, width), BY_CHANNEL | WRITING
    return Rule(inputs, delta_rule, kda.prepare, gdn.decode_step, state, OF_DELTA_RULES, extremes, idle)


def gated_linear_attention(heads: int = 3, keys: int = 16, values: int = 40) -> Rule:
    parts = ("read_MtK", "within_MtV", "write_MtK", "value_MtV", "decay_MK1")
    inputs, idle = attending(heads, keys, values, heads, True, False), {"gate": 0.0, "size": 0.0}
    return Rule(inputs, gated, gla.prepare, gla.decode_step, (heads, keys, values), parts, BY_CHANNEL, idle)


def state_space(heads: int = 6, groups: int = 2, width: int = 16, state: int = 24) -> Rule:
    generator = torch.Generator().manual_seed(5)
    rate_H, skip_H = randoms(generator, (heads,), (heads,))
    rate_H = -rate_H.abs()

    def inputs(step: float = 1.0, burst: float = 1.0) -> Inputs:
        """Steps of up to `step`, every seventh of them `burst` times as long."""
        generator, of_group = torch.Generator().manual_seed(0), (LENGTH, groups, state)
        x_THP, dt_TH, b_TGN, c_TGN = randoms(generator, (LENGTH, heads, width), (LENGTH, heads), of_group, of_group)
        dt_TH = step * dt_TH.abs()
        dt_TH[::7] *= burst
        return x_THP, dt_TH, b_TGN, c_TGN

    def exact(x_THP: Tensor, dt_TH: Tensor, b_TGN: Tensor, c_TGN: Tensor, state_HNP: Tensor) -> Outputs:
        return mamba2.state_space(x_THP, dt_TH, rate_H.double(), b_TGN, c_TGN, skip_H.double(), state_HNP)

    def step(*row_and_state: Tensor) -> Tensor:
        *row, state_BHNP = row_and_state
        return mamba2.decode_step(mamba2.Inputs(*(t.unsqueeze(1) for t in row)), rate_H, skip_H, state_BHNP)

    def prepare(*given: Tensor) -> mamba2.Chunks:
        return mamba2.prepare(mamba2.Inputs(*given), rate_H, skip_H)

    extremes: Extremes = {
        "ordinary": {},
        "state forgotten at once": {"step": 1e3},
        "sums of decays far below the smallest exponent": {"step": 1e30},
        "forgetting in bursts": {"burst": 300.0},
        "everything forgotten in bursts": {"burst": 1e30},
        "little forgotten after bursts": {"step": 1e-3, "burst": 1e8},
        "next to nothing forgotten": {"step": 1e-6},
        "no step": {"step": 0.0},
    }
    parts = tuple(mamba2.Chunks.__dataclass_fields__)
    return Rule(inputs, exact, prepare, step, (heads, state, width), parts, extremes, {"step": 0.0})


RULES = {
    "gdn": gated_delta_net(),
    "kda": kimi_delta_attention(),
    "gla": gated_linear_attention(),
    "mamba2": state_space(),
}
of_each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


def chunked(rule: Rule, given: Inputs, state_HKV: Tensor) -> Outputs:
    chunks, state_HKV, outs = rule.chunks(given), state_HKV.clone(), []
    heads, _, values = rule.state
    for i in range(CHUNKS):
        outs.append(torch.empty(heads, CHUNK, values))
        chunks.advance_into(slice(i * heads, (i + 1) * heads), state_HKV, outs[-1])
    return torch.cat(outs, 1).transpose(0, 1), state_HKV


def decoded(rule: Rule, given: Inputs, state_HKV: Tensor) -> Outputs:
    state_1HKV = state_HKV[None].clone()
    outs = [rule.step(*row, state_1HKV) for row in zip(*(t.split(1) for t in given), strict=True)]
    return torch.cat(outs), state_1HKV[0]


@pytest.mark.parametrize("run", [chunked, decoded])
@pytest.mark.parametrize(("name", "extreme"), [(name, extreme) for name in RULES for extreme in RULES[name].extremes])
def test_extreme_gates_and_keys_stay_within_1e_5_of_float64(run, name: str, extreme: str) -> None:
    rule = RULES[name]
    given, state_HKV = rule.inputs(**rule.extremes[extreme]), rule.start()[0]
    exact = rule.exact(*(t.double() for t in (*given, state_HKV)))
    for got, wanted in zip(run(rule, given, state_HKV), exact, strict=True):
        assert got.isfinite().all()
        assert (got - wanted).abs().max() <= max(1e-5 * wanted.abs().max(), FLUSHED)


@of_each_rule
def test_padding_that_changes_nothing_keeps_the_states_bits(rule: Rule) -> None:
    state_HKV = rule.start()[0]
    _, after_HKV = chunked(rule, rule.inputs(**rule.idle), state_HKV)
    assert torch.equal(after_HKV, state_HKV)


@of_each_rule
def test_chunks_prepared_together_or_apart_have_the_same_bits(rule: Rule) -> None:
    given, heads = rule.inputs(), rule.state[0]
    together = rule.chunks(given)
    for i in range(CHUNKS):
        apart = rule.prepare(*(t[None, i * CHUNK : (i + 1) * CHUNK] for t in given))
        for name in rule.parts:
            assert torch.equal(getattr(together, name)[i * heads : (i + 1) * heads], getattr(apart, name)), name


@pytest.mark.parametrize("rule", [*RULES.values(), gated_linear_attention(3, 128, 200), kimi_delta_attention(5, 128)])
def test_sequence_decodes_to_the_same_bits_by_itself_and_among_others(rule: Rule) -> None:
    n = 16
    given, state_BHKV = [t[:n] for t in rule.inputs()], rule.start(n)
    together_BHKV = state_BHKV.clone()
    out_BHV = rule.step(*given, together_BHKV)
    for b in range(n):
        alone_1HKV = state_BHKV[b : b + 1].clone()
        assert torch.equal(rule.step(*(t[b : b + 1] for t in given), alone_1HKV)[0], out_BHV[b])
        assert torch.equal(alone_1HKV[0], together_BHKV[b])


def test_transition_equals_the_update_of_a_state_without_values() -> None:
    rule = RULES["kda"]
    heads, width, _ = rule.state
    (qk_T2HK, v_THV, g_THK, beta_TH), state_HKV = rule.inputs(), rule.start()[0]
    nothing = (qk_T2HK, torch.zeros_like(v_THV), g_THK * 0.01, beta_TH)
    chunks, transition_HKK = rule.chunks(nothing), torch.eye(width).repeat(heads, 1, 1)
    for i in range(CHUNKS):
        chunks.transition_into(slice(i * heads, (i + 1) * heads), transition_HKK)
    _, wanted_HKV = rule.exact(*(t.double() for t in (*nothing, state_HKV)))
    moved_HKV = transition_HKK.double() @ state_HKV.double()
    assert (moved_HKV - wanted_HKV).abs().max() < 1e-5 * wanted_HKV.abs().max()
