"""How fast is Gated DeltaNet here, in prefill against transformers' chunked rule, and in decode by batch size?

    python benchmarks/mixers.py [--repeats 7] [--threads 2] [--small]

Both sides run in turns within one process.
"""

from __future__ import annotations

from collections.abc import Callable

import measure
import torch
from measure import Row, ratios, timed
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, torch_chunk_gated_delta_rule

from headwater.mixers.batch import Slice, StepBatch
from headwater.mixers.gated_delta_net import GatedDeltaNet, LayerState
from headwater.mixers.gated_delta_net.fast import CHUNK, advance_into, decode_step, prepare
from headwater.mixers.gated_delta_net.layer import HEADS_A_BLOCK
from headwater.spec import DeltaNetShape

SHAPE = DeltaNetShape(k_heads=4, v_heads=8, k_dim=128, v_dim=128, conv_kernel=4)
WIDTH, DECODE_STEPS = 1024, 20
TOKENS, SMALL_TOKENS = 8192, 512
COMPARED = (
    ("rule, headwater", "rule, transformers"),
    ("layer, headwater, 1 sequence", "layer, transformers, 1 sequence"),
)
Work = dict[str, Callable[[], object]]


def rule_work(n_tokens: int) -> Work:
    """The rule alone, from raw queries, keys, values and gates."""
    s = SHAPE
    qk_T2GK = torch.randn(n_tokens, 2, s.k_heads, s.k_dim)
    v_THV = torch.randn(n_tokens, s.v_heads, s.v_dim)
    g_TH, beta_TH = -torch.rand(n_tokens, s.v_heads), torch.rand(n_tokens, s.v_heads)
    chunked = [t.unflatten(0, (-1, CHUNK)) for t in (qk_T2GK, v_THV, g_TH, beta_TH)]
    n_chunks, a_block = n_tokens // CHUNK, HEADS_A_BLOCK // s.v_heads

    def ours() -> None:
        state_HKV = torch.zeros(s.v_heads, s.k_dim, s.v_dim)
        out_nHtV = torch.empty(n_chunks, s.v_heads, CHUNK, s.v_dim)
        for first in range(0, n_chunks, a_block):
            chunks = prepare(*(t[first : first + a_block] for t in chunked))
            for i in range(min(a_block, n_chunks - first)):
                advance_into(chunks, slice(i * s.v_heads, (i + 1) * s.v_heads), state_HKV, out_nHtV[first + i])

    def theirs() -> None:
        q_1TGK, k_1TGK = (t[None] for t in qk_T2GK.unbind(1))
        torch_chunk_gated_delta_rule(
            q_1TGK, k_1TGK, v_THV[None], g=g_TH[None], beta=beta_TH[None], use_qk_l2norm_in_kernel=True
        )

    return {"rule, headwater": ours, "rule, transformers": theirs}


def step_of(lengths: list[int], decode: int, rows: int) -> StepBatch:
    none = torch.empty(0, dtype=torch.int64)
    slices = tuple(Slice(sum(lengths[:i]), n, 0, rows - 1 - i, none, 0) for i, n in enumerate(lengths))
    return StepBatch(none, none, slices, torch.arange(decode), (none,) * decode, none)


def layer_work(n_tokens: int) -> Work:
    """The whole layer with its projections, convolution and norms."""
    s = SHAPE
    config = Qwen3_5TextConfig(
        hidden_size=WIDTH,
        linear_num_key_heads=s.k_heads,
        linear_num_value_heads=s.v_heads,
        linear_key_head_dim=s.k_dim,
        linear_value_head_dim=s.v_dim,
        linear_conv_kernel_dim=s.conv_kernel,
    )
    theirs = Qwen3_5GatedDeltaNet(config, 0).eval()
    ours = GatedDeltaNet(s, config.rms_norm_eps, dict(theirs.named_parameters()))
    state = LayerState(torch.zeros(40, s.v_heads, s.k_dim, s.v_dim), torch.zeros(40, s.channels, s.conv_kernel - 1))
    x_TD = torch.randn(n_tokens, WIDTH)
    one, eight = step_of([n_tokens], 0, 40), step_of([n_tokens // 8] * 8, 0, 40)
    return {
        "layer, headwater, 1 sequence": lambda: ours.forward(x_TD, one, state),
        "layer, headwater, 8 sequences": lambda: ours.forward(x_TD, eight, state),
        "layer, transformers, 1 sequence": lambda: theirs(x_TD[None]),
        **{f"layer, decode of {b}": _decode_steps(ours, state, b) for b in (1, 8)},
    }


def _decode_steps(layer: GatedDeltaNet, state: LayerState, n: int) -> Callable[[], object]:
    x_BD, batch = torch.randn(n, WIDTH), step_of([], n, 40)
    return lambda: [layer.forward(x_BD, batch, state) for _ in range(DECODE_STEPS)]


def decode_work() -> Work:
    """The decode rule alone: DECODE_STEPS tokens of each sequence."""
    s, work = SHAPE, {}
    for n in (1, 8):
        given = (
            torch.randn(n, 2, s.k_heads, s.k_dim),
            torch.randn(n, s.v_heads, s.v_dim),
            -torch.rand(n, s.v_heads),
            torch.rand(n, s.v_heads),
        )
        state_BHKV = torch.zeros(n, s.v_heads, s.k_dim, s.v_dim)
        work[f"rule, decode of {n}"] = lambda given=given, state=state_BHKV: [
            decode_step(*given, state) for _ in range(DECODE_STEPS)
        ]
    return work


def rows_of(figures: measure.Figures) -> list[Row]:
    """Times, and the ratio to transformers' where it runs the same piece."""
    rows = [Row(name, "ms", [1e3 * s for s in seconds]) for name, seconds in figures.items()]
    for ours, theirs in COMPARED:
        if ours in figures:
            rows.append(Row(f"{theirs} / headwater", "x", ratios(figures[theirs], figures[ours])))
    return rows


def main() -> None:
    given = measure.options(__doc__, "mixers", repeats=7)
    torch.manual_seed(given.seed)
    n_tokens = SMALL_TOKENS if given.small else TOKENS
    rows: list[Row] = []
    with torch.inference_mode():
        for work in (rule_work(n_tokens), layer_work(n_tokens), decode_work()):
            rows += rows_of(measure.in_turns({name: timed(run) for name, run in work.items()}, given.repeats))
    measure.report(given, rows, shape=repr(SHAPE), tokens=n_tokens, decode_steps=DECODE_STEPS)


if __name__ == "__main__":
    main()
