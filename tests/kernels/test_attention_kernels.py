"""Attention of decoding rows by kernels: close to torch's, with bits that depend only on a row's own sequence."""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="numba is not installed")

import numba

from headwater.engine.proof import cpu_checks
from headwater.engine.proof.cpu_checks import ADJACENT_TOKENS, PAGE, broken_attention
from headwater.engine.proof.selfcheck import self_check
from headwater.kernels import attention
from headwater.kernels.compiling import use_threads
from headwater.layers.attention import GroupedAttention, Rotary, WindowAttention
from headwater.layers.rotary_scaling import Llama3
from headwater.mixers.attention import Attention, AttentionStep
from headwater.mixers.batch import StepBatch
from headwater.mixers.cpu.attention import (
    SCRATCH_BYTES,
    AttentionOnCpu,
    AttentionStepOnCpu,
    DecodeRows,
    Gates,
    HeadShape,
    Pages,
)
from headwater.mixers.slices import Slice
from headwater.mixers.weights import Weights
from tests.mixers.attention_rig import GroupedRig, spec_of

HIDDEN = 48
PAGES = 48
LENGTHS = (1, 2, 15, 64, 65, 127, 128, 129, 300, 513)
SHAPES = {
    "no positions": GroupedAttention(HIDDEN, 4, 2, 16),
    "biases": GroupedAttention(HIDDEN, 4, 2, 16, bias=True, out_bias=True, rotary=Rotary(16)),
    "scale": GroupedAttention(HIDDEN, 6, 3, 16, scale=0.7, rotary=Rotary(16, theta=500.0)),
    "scaled": GroupedAttention(HIDDEN, 4, 2, 16, rotary=Rotary(16, scaling=Llama3(8.0, 1.0, 4.0, 64), amplitude=1.3)),
    "neighbours": GroupedAttention(HIDDEN, 5, 1, 32, rotary=Rotary(16, neighbours=True)),
    "some channels": GroupedAttention(HIDDEN, 4, 4, 48, rotary=Rotary(10)),
    "sinks": GroupedAttention(HIDDEN, 6, 2, 16, sinks=True, rotary=Rotary(16)),
    "all": GroupedAttention(HIDDEN, 6, 1, 32, gated=True, normed=True, norm_offset=1.0, rotary=Rotary(8)),
}
NONE = torch.empty(0, dtype=torch.int64)


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = numba.get_num_threads()
    use_threads(n)
    yield
    use_threads(before)


class Rig(GroupedRig):
    """One layer over a poisoned arena in which some sequences were prefilled by torch."""

    def __init__(self, shape: GroupedAttention, dtype: torch.dtype = torch.float32, seed: int = 0, page_size: int = 64):
        super().__init__(shape, max(LENGTHS) + len(LENGTHS), dtype, page_size, PAGES)
        self.torch, self.kernels = self.layer, AttentionOnCpu(0, shape, Weights(self.tensors, dtype))
        pages = iter(torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed)).tolist())
        self.tables = []
        for length in LENGTHS:
            table = torch.tensor([next(pages) for _ in range(-(-length // page_size))])
            self.tables.append(table)
            if length > 1:
                self.run([Slice(0, length - 1, 0, 0, table, 0)], [], self.x[: length - 1])

    def run_layer(self, layer: Attention, decoded: list[int], slices: list[Slice], x: torch.Tensor) -> torch.Tensor:
        """Run slices, and one row of each of these sequences."""
        self.layer, self.steps = layer, AttentionStepOnCpu if layer is self.kernels else AttentionStep
        return self.run(slices, [(LENGTHS[i] - 1, self.tables[i]) for i in decoded], x)

    def decode(self, layer: Attention, decoded: list[int]) -> torch.Tensor:
        return self.run_layer(layer, decoded, [], self.x[[LENGTHS[i] for i in decoded]])


ALL = list(range(len(LENGTHS)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("name", SHAPES)
def test_reads_and_writes_are_those_of_torch(name, dtype, tolerance):
    rig = Rig(SHAPES[name], dtype)
    wanted = rig.decode(rig.torch, ALL)
    pages = rig.arena.pages.view(dtype).clone()
    for i, length in enumerate(LENGTHS):  # the new tokens' keys and values are written again
        at = (rig.tables[i][(length - 1) // 64], (length - 1) % 64)
        for tensor in rig.arena.pages_of(0):
            tensor.view(PAGES, 64, -1)[at] = torch.nan
    got = rig.decode(rig.kernels, ALL)
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(rig.arena.pages.view(dtype), pages, rtol=tolerance, atol=1e-5, equal_nan=True)


def test_long_tables_of_poisoned_pages_are_not_read():
    rig = Rig(SHAPES["all"])
    wanted = rig.decode(rig.kernels, ALL)
    used = torch.cat(rig.tables)
    free = torch.tensor([page for page in range(PAGES) if page not in used])
    rig.tables = [torch.cat([table, free]) for table in rig.tables]
    assert torch.equal(rig.decode(rig.kernels, ALL), wanted)
    assert not wanted.isnan().any()


def broken(monkeypatch, when):
    """Let the kernel's queries be larger by a millionth, if `when` says so of a call's number of rows."""
    attend = attention.attend

    def differing(q, *others):
        attend(q * (1 + 1e-6) if when(len(others[3])) else q, *others)

    monkeypatch.setattr(attention, "attend", differing)


def alone_and_together_are_equal(rig):
    alone = torch.cat([rig.decode(rig.kernels, [i]) for i in ALL])
    turned = rig.decode(rig.kernels, ALL[::-1]).flip(0)
    some = rig.decode(rig.kernels, [7, 3, 9])
    return torch.equal(rig.decode(rig.kernels, ALL), alone) and torch.equal(turned, alone) and torch.equal(
        some, alone[[7, 3, 9]]
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["all", "neighbours", "some channels"])
def test_company_and_order_change_no_bit(name, dtype, monkeypatch):
    rig = Rig(SHAPES[name], dtype)
    assert alone_and_together_are_equal(rig)
    broken(monkeypatch, lambda rows: rows == 3)
    assert dtype is torch.bfloat16 or not alone_and_together_are_equal(rig)


def tokens_of_one_sequence(rig, layer, steps):
    """Decode tokens at positions 290 to 296 of a sequence, across a split, these together in each step."""
    table = rig.tables[8]
    first = LENGTHS[8] - 10
    for tensor in rig.arena.pages_of(0):
        tensor.view(PAGES, 64, -1)[table[first // 64], first % 64 :] = torch.nan  # not yet written
    outputs = []
    for rows in steps:
        positions = torch.tensor([first + row for row in rows])
        slots, tables = torch.zeros(len(rows), dtype=torch.int64), (table,) * len(rows)
        parents = tuple(i - 1 for i in range(len(rows)))
        batch = StepBatch(NONE, positions, (), slots, tables, NONE, parents=parents)
        step = AttentionStepOnCpu if layer is rig.kernels else AttentionStep
        outputs.append(layer.forward(rig.x[rows], step.of(batch, rig.arena, rig.dtype)))
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of", ["kernels", "torch"])
def test_attention_of_several_tokens_in_one_step_equals_them_in_turn(of, dtype):
    rig = Rig(SHAPES["all"], dtype)
    layer = getattr(rig, of)
    in_turn = tokens_of_one_sequence(rig, layer, [[row] for row in range(7)])
    assert not in_turn.isnan().any()
    assert torch.equal(tokens_of_one_sequence(rig, layer, [[*range(7)]]), in_turn)
    assert torch.equal(tokens_of_one_sequence(rig, layer, [[0, 1], [2, 3, 4, 5, 6]]), in_turn)


def test_a_row_that_sees_the_tokens_after_it_is_found(monkeypatch):
    """The control of the test above."""
    rig, attend = Rig(SHAPES["all"]), attention.attend
    in_turn = tokens_of_one_sequence(rig, rig.kernels, [[row] for row in range(7)])

    def seeing_all(q, keys, values, tables, positions, *others):
        attend(q, keys, values, tables, positions * 0 + positions.max(), *others)

    monkeypatch.setattr(attention, "attend", seeing_all)
    got = tokens_of_one_sequence(rig, rig.kernels, [[*range(7)]])
    assert [torch.equal(*pair) for pair in zip(got, in_turn, strict=True)] == [False] * 6 + [True]


def outputs_by_threads(rig):
    outputs = []
    for n in (1, 2, 3):
        with threads(n):
            outputs.append(rig.decode(rig.kernels, ALL * 3))
    return outputs


def test_threads_change_no_bit(monkeypatch):
    rig = Rig(SHAPES["all"])
    first, *others = outputs_by_threads(rig)
    assert all(torch.equal(first, other) for other in others)
    broken(monkeypatch, lambda _: numba.get_num_threads() == 2)
    first, *others = outputs_by_threads(rig)
    assert numba.config.NUMBA_NUM_THREADS == 1 or not all(torch.equal(first, other) for other in others)


def test_rows_in_groups_whose_scratch_is_small_have_the_same_bits(monkeypatch):
    rig, groups, attend = Rig(SHAPES["all"]), [], attention.attend
    together = rig.decode(rig.kernels, ALL)

    def noting(q, keys, values, tables, positions, *others):
        groups.append(len(positions))
        attend(q, keys, values, tables, positions, *others)

    monkeypatch.setattr(attention, "attend", noting)
    monkeypatch.setattr("headwater.mixers.cpu.attention.SCRATCH_BYTES", 3 * 4 * 5 * 8 * (2 + 32))  # of 3 rows, 5 splits
    assert torch.equal(rig.decode(rig.kernels, ALL), together)
    assert groups == [3, 3, 3, 1]


@pytest.mark.parametrize(("heads", "kv_heads", "key_width", "width"), [(32, 8, 128, 128), (64, 1, 576, 512)])
def test_scratch_of_32_rows_of_one_long_sequence_is_bounded(monkeypatch, heads, kv_heads, key_width, width):
    sizes, n, longest, none = [], 32, 131_072, np.empty(0, np.float32)
    named = signature(attention.attend.compiled.py_func)

    def noting(*given):
        of = named.bind(*given).arguments
        sizes.append((len(of["positions"]), of["highest_sum"].nbytes + of["reads"].nbytes))

    monkeypatch.setattr(attention, "attend", noting)
    rows = DecodeRows(np.arange(longest - n, longest), np.zeros((n, longest // 64), np.int64), longest)
    q, out = np.empty(n * heads * key_width, np.float32), np.empty(n * heads * width, np.float32)
    pages = Pages(none, none, 0, 64)
    rows.attend(q, pages, Gates(none), out, heads * width, HeadShape(heads, kv_heads, key_width, width))
    assert sum(rows for rows, _ in sizes) == n
    assert all(held <= SCRATCH_BYTES or rows == 1 for rows, held in sizes)
    assert max(held for _, held in sizes) < 2.1 * SCRATCH_BYTES


def test_the_places_and_sizes_of_pages_change_no_bit():
    wanted = Rig(SHAPES["all"])
    others = (Rig(SHAPES["all"], seed=seed, page_size=size) for seed, size in ((1, 64), (2, 128), (3, 192)))
    first = wanted.decode(wanted.kernels, ALL)
    assert all(torch.equal(other.decode(other.kernels, ALL), first) for other in others)


def test_the_order_of_keys_changes_bits_and_little_else():
    """Control of the tests above: without positions, the same keys in other pages of the table are summed otherwise."""
    rig = Rig(SHAPES["no positions"])
    last = len(ALL) - 1
    first = rig.decode(rig.kernels, [last])
    rig.tables[last] = torch.cat([rig.tables[last][:-1].flip(0), rig.tables[last][-1:]])
    turned = rig.decode(rig.kernels, [last])
    torch.testing.assert_close(turned, first, rtol=1e-5, atol=1e-5)
    assert not torch.equal(turned, first)


def test_rows_of_prompts_are_those_of_torch():
    rig = Rig(SHAPES["all"])
    alone = rig.decode(rig.kernels, [3, 8])
    table = torch.tensor([page for page in range(PAGES) if page not in torch.cat(rig.tables)])[:3]
    prompt = [Slice(0, 150, 0, 0, table, 0)]
    wanted = rig.run_layer(rig.torch, [], prompt, rig.x[:150])
    rows = rig.x[[*range(150), LENGTHS[3], LENGTHS[8]]]
    got = rig.run_layer(rig.kernels, [3, 8], prompt, rows)
    assert torch.equal(got[:150], wanted)
    assert torch.equal(got[150:], alone)


@pytest.mark.parametrize("shape", [SHAPES["all"], WindowAttention(HIDDEN, 4, 2, 16, window=100)])
def test_the_self_check_tries_sequences_and_threads(shape, monkeypatch):
    spec = spec_of(shape, HIDDEN)
    assert self_check(spec).deterministic
    broken(monkeypatch, lambda rows: rows == 2)
    assert self_check(spec).broken_by == f"kernel of {shape.kind} at 2 decoding sequences"
    monkeypatch.undo()
    broken(monkeypatch, lambda _: numba.get_num_threads() == 1)
    with threads(2):
        expected = None if numba.get_num_threads() == 1 else f"kernel of {shape.kind} on 1 threads"
        assert self_check(spec).broken_by == expected


def found(shape, dtype=torch.float32):
    """Return what the self-check names at two threads."""
    generator = torch.Generator().manual_seed(0)
    with threads(2):
        return list(broken_attention(shape, lambda *size: torch.randn(size, generator=generator).to(dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["all", "neighbours", "some channels"])
def test_the_self_check_finds_the_kernels_exact(name, dtype):
    assert found(SHAPES[name], dtype) == []


def changed_pages(monkeypatch, change):
    """Let `change` alter keys or values, [pages, tokens, 32], after the kernel wrote those of several rows of one."""
    place = attention.place

    def changing(x, keys, values, q, positions, tables, *others):
        before = keys.copy()
        place(x, keys, values, q, positions, tables, *others)
        if len(positions) == ADJACENT_TOKENS and len(set(tables)) == cpu_checks.PAGES:
            change(before.reshape(-1, PAGE, 32), *(part.reshape(-1, PAGE, 32) for part in (keys, values)), positions)

    monkeypatch.setattr(attention, "place", changing)


def the_last_but_one_is_not_written(before, keys, values, positions):
    keys[-cpu_checks.PAGES :].reshape(-1, 32)[positions[-2]] = before[-cpu_checks.PAGES :].reshape(-1, 32)[
        positions[-2]
    ]


def the_first_two_are_exchanged(before, keys, values, positions):
    of_sequence = values[-cpu_checks.PAGES :].reshape(-1, 32)
    of_sequence[positions[:2]] = of_sequence[positions[1::-1]]


def one_more_is_written(before, keys, values, positions):
    keys[-1, -1] = keys[-cpu_checks.PAGES, 0]


@pytest.mark.parametrize("change", [the_last_but_one_is_not_written, the_first_two_are_exchanged, one_more_is_written])
def test_self_check_names_keys_that_differ_from_those_computed_in_turn(monkeypatch, change):
    changed_pages(monkeypatch, change)
    assert found(SHAPES["all"]) == [f"kernel of attention at {ADJACENT_TOKENS} tokens of a sequence"]
