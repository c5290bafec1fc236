"""Legs that continue a tail in mid-page have the bits of a leg from the page's first token."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwater import kernels
from headwater.mixers import numerics, tails
from headwater.mixers.linear import Linear
from headwater.mixers.numerics import Numerics
from headwater.mixers.slices import Keep
from headwater.models.hybrid import HybridModel
from headwater.models.load import load_model
from tests.models.tail_rig import PAGE, Leg, TailBench, same
from tests.models.test_hybrid import FAMILIES, SHAPES
from tests.support import FULL

TOKENS = random.Random(2).choices(range(1, 200), k=420)
LENGTHS = (1, 7, 31, 63)  # of tails
STARTS = (0, 128) if FULL else (128,)
MORE = (1, PAGE, 2 * PAGE + 43)  # tokens after a page boundary, or after the tail, up to which a leg computes
QUICK = ("qwen3_5", "qwen3_window", "granite_moe", "ring", "jamba_moe", "kimi_linear")
Load = Callable[..., HybridModel]


def cells(formats: tuple[str, ...] = ("auto",)) -> Iterator:
    """(recipe, dtype, format of weights, kernels), of which most are part of `make test-full` only."""
    for name in (*FAMILIES, *SHAPES):
        for dtype in ("float32", "bfloat16"):
            for form in formats:
                for compiled in (True, False):
                    odd = name in SHAPES or form != "auto" or not compiled
                    quick = (name in QUICK and not odd) or (name == "qwen3_5" and dtype == "bfloat16")
                    marks = [] if quick else [pytest.mark.full]
                    yield pytest.param(name, dtype, form, compiled, marks=marks, id=f"{name}-{dtype}-{form}-{compiled}")


@pytest.fixture(scope="module")
def load(checkpoint: Callable[[str], Path]) -> Load:
    known: dict[tuple[str, str, str, bool], HybridModel] = {}

    def get(name: str = "qwen3_5", dtype: str = "bfloat16", form: str = "auto", compiled: bool = True) -> HybridModel:
        key = (name, dtype, form, compiled)
        if key not in known:
            with pytest.MonkeyPatch.context() as patch:
                if not compiled:
                    patch.setattr(kernels, "available", lambda: False)
                numerics.use(Numerics("compiled" if compiled and kernels.available() else "tiled"))
                known[key] = load_model(checkpoint(name), dtype, weights=form).model
            numerics.use(Numerics())
        return known[key]

    return get


@pytest.mark.parametrize(("name", "dtype", "form", "compiled"), cells(("auto", "int8", "int4")))
def test_leg_from_mid_page_has_bits_of_whole_leg(name: str, dtype: str, form: str, compiled: bool, load: Load) -> None:
    """Logits, KV, the state at the end and all checkpoints on the way."""
    model = load(name, dtype, form, compiled)
    for start in STARTS:
        for length in LENGTHS:
            position = start + length
            for end in sorted({position + MORE[0], *(start + more for more in MORE[1:])}):
                rig = TailBench(model, TOKENS)
                whole = rig.prefilled(start)
                saves = tuple((at, 20 + i) for i, at in enumerate(range(start + PAGE, end, PAGE)))
                (wanted,) = rig.step([Leg(whole, end, saves=saves)])
                saved = [rig.state(row) for _, row in saves]
                like, stored, _ = rig.stored(position)
                seq, kept = rig.resumed(like, stored, position)
                (got,) = rig.step([Leg(seq, end, kept, 1, saves=saves)])
                assert same([got], [wanted[length:]]), (start, length, end)
                assert same(rig.kv(seq, start, end), rig.kv(whole, start, end)), (start, length, end)
                assert torch.equal(rig.state(seq.slot), rig.state(whole.slot)), (start, length, end)
                assert same([rig.state(row) for _, row in saves], saved), (start, length, end)


def in_company(rig: TailBench, position: int, end: int) -> list[torch.Tensor]:
    """Logits of a leg after a tail, with other legs after tails, one without, and decoding sequences."""
    decoding = [rig.prefilled(n) for n in (70, 40)]
    legs = []
    for row, (at, to) in enumerate(((position, end), (position + 9, end - 20), (position - 5, position + 30)), 1):
        like, stored, _ = rig.stored(at)
        seq, kept = rig.resumed(like, stored, at, row)
        legs.append(Leg(seq, to, kept, row))
    legs.insert(1, Leg(rig.sequence(), 100))
    logits = rig.step(legs, [(seq, 7) for seq in decoding])
    return [*logits, *rig.step([], [(leg.seq, 9) for leg in legs])]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.full]) for n in FAMILIES])
def test_legs_after_tails_change_no_bit_in_company(name: str, load: Load) -> None:
    """Nor do they change the bits of decoding sequences, and of legs without a tail; they are decoded afterwards."""
    model, position, end = load(name), 128 + 31, 300
    got = in_company(TailBench(model, TOKENS), position, end)
    rig = TailBench(model, TOKENS)
    ends = (end, 100, end - 20, position + 30)
    seqs = [rig.sequence() for _ in ends]
    whole = [rig.step([Leg(seq, to)])[0] for seq, to in zip(seqs, ends, strict=True)]
    firsts = (position, 0, position + 9, position - 5)
    wanted = [logits[first:] for logits, first in zip(whole, firsts, strict=True)]
    wanted += [rig.step([], [(rig.prefilled(n), 7)])[0] for n in (70, 40)]
    wanted += [rig.step([], [(seq, 9)])[0] for seq in seqs]
    assert same(got, wanted)


@pytest.mark.parametrize("name", QUICK)
def test_tail_serves_every_shorter_length(name: str, load: Load) -> None:
    rig = TailBench(load(name), TOKENS)
    whole = rig.prefilled(128)
    (wanted,) = rig.step([Leg(whole, 230)])
    like, stored, _ = rig.stored(128 + 50)
    for length in (1, 3, 49):
        seq, kept = rig.resumed(like, stored, 128 + length)
        (got,) = rig.step([Leg(seq, 230, kept, 1)])
        assert same([got], [wanted[length:]])
        assert torch.equal(rig.state(seq.slot), rig.state(whole.slot))


@pytest.mark.parametrize("name", QUICK)
def test_leg_after_tail_keeps_the_bits_of_longer_tail(name: str, load: Load) -> None:
    """The rows of a tail that is partly or wholly in the kept rows of a leg are those that a whole leg keeps."""
    rig = TailBench(load(name), TOKENS)
    like, short, _ = rig.stored(128 + 9)
    _, longer, _ = rig.stored(128 + 40, 300)
    seq, kept = rig.resumed(like, short, 128 + 9)
    rig.step([Leg(seq, 250, kept, 1, keeps=(Keep(128, 128 + 40, 2), Keep(128, 128 + 5, 3), Keep(192, 203, 4)))])
    for row, length in ((2, 40), (3, 5)):
        one = rig.store(row, seq, 128, 128 + length, short.state_B)
        for stored in (one, longer):
            rig.tails.restore(1, rig.arena.pages, stored.rows, length)
            if stored is one:
                got = {layer: rig.tails.view(layer)[1, :length].clone() for layer in layers(rig)}
        assert all(torch.equal(rig.tails.view(layer)[1, :length], rows) for layer, rows in got.items())


def layers(rig: TailBench) -> list[int]:
    """The layers of which a tail keeps something."""
    return [layer for layer, (_, width) in enumerate(rig.spec.tail.widths) if width]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.full]) for n in FAMILIES])
def test_leg_without_rows_has_state_and_logits_of_whole_leg(name: str, load: Load) -> None:
    rig = TailBench(load(name), TOKENS)
    for start, length in ((128, 63), (128, 1), (0, 20)):
        whole = rig.prefilled(start)
        (wanted,) = rig.step([Leg(whole, start + length)])
        like, stored, _ = rig.stored(start + length)
        seq, kept = rig.resumed(like, stored, start + length)
        rig.advance(Leg(seq, seq.length, kept, 1))
        assert torch.equal(rig.state(seq.slot), rig.state(whole.slot))
        assert same([rig.model.logits(rig.tails.hidden_RC[1:2])[0]], [wanted[-1]])
        assert same(*(rig.step([], [(one, 5)]) for one in (seq, whole)))


def test_leg_without_rows_computes_no_product(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, product, rows = TailBench(load("qwen3_5"), TOKENS), Linear.__call__, list[int]()
    like, stored, _ = rig.stored(128 + 9)
    seq, kept = rig.resumed(like, stored, 128 + 9)
    monkeypatch.setattr(Linear, "__call__", lambda of, x, n: (rows.append(len(x)), product(of, x, n))[1])
    rig.advance(Leg(seq, seq.length, kept, 1))
    assert rows == [0, 0]


# -- controls: each must change bits


def resumed_wrongly(load: Load, spoil: Callable[[TailBench], None], **leg: int) -> bool:
    """Whether a leg after a tail has other bits than a whole one, once the tail memory was changed."""
    rig = TailBench(load("qwen3_5_sharded", "float32"), TOKENS)
    whole = rig.prefilled(128)
    (wanted,) = rig.step([Leg(whole, 230)])
    like, stored, _ = rig.stored(128 + 31)
    seq, kept = rig.resumed(like, stored, 128 + 31)
    spoil(rig)
    (got,) = rig.step([Leg(seq, 230, **{"kept": kept, "tail": 1, **leg})])
    return not torch.equal(got, wanted[31:])


def test_tail_as_it_was_stored_gives_equal_bits(load: Load) -> None:
    """The control of the controls."""
    assert not resumed_wrongly(load, lambda rig: None)


def test_products_shifted_by_a_row_are_found(load: Load) -> None:
    def shift(rig: TailBench) -> None:
        for layer in layers(rig):
            rig.tails.view(layer)[1, :31] = rig.tails.view(layer)[1, :31].roll(1, 0)

    assert resumed_wrongly(load, shift)


def test_gates_of_another_sequence_are_found(load: Load) -> None:
    def exchange(rig: TailBench) -> None:
        other = TailBench(rig.model, TOKENS[::-1])
        _, stored, _ = other.stored(128 + 31)
        other.tails.restore(1, other.arena.pages, stored.rows, 31)
        for layer in layers(rig):
            gates = 2 * rig.spec.layers[layer].v_heads
            rig.tails.view(layer)[1, :31, -gates:] = other.tails.view(layer)[1, :31, -gates:]

    assert resumed_wrongly(load, exchange)


def test_inputs_of_convolution_left_out_are_found(load: Load) -> None:
    def leave_out(rig: TailBench) -> None:
        for layer in layers(rig):
            rig.tails.view(layer)[1, 28:31, : rig.spec.layers[layer].channels] = 0

    assert resumed_wrongly(load, leave_out)


def test_stale_rows_beyond_end_of_tail_are_found(load: Load) -> None:
    """A tail of 31 tokens that is used as one of 30: the row of the last token is another's."""

    def stale(rig: TailBench) -> None:
        for layer in layers(rig):
            rig.tails.view(layer)[1, 30] = rig.tails.view(layer)[1, 29]

    assert resumed_wrongly(load, stale)


def test_rows_beyond_end_of_tail_are_not_read(load: Load) -> None:
    def stale(rig: TailBench) -> None:
        for layer in layers(rig):
            rig.tails.view(layer)[1, 31:] = float("nan")

    assert not resumed_wrongly(load, stale)


def test_chunks_cut_at_first_token_of_leg_are_found(load: Load) -> None:
    """The state after the tail, and a slice that begins there."""

    def advance(rig: TailBench) -> None:
        assert rig.last is not None
        rig.advance(Leg(rig.last, rig.last.length, 31, 1))

    assert resumed_wrongly(load, advance, kept=0)


def test_products_of_decoding_rows_are_found(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tail of tokens that were decoded one by one, whose products have decode's bits."""
    found: dict[int, list[torch.Tensor]] = {}
    original = tails.outputs

    def noting(layer, products, batch, state):
        found.setdefault(id(layer), []).append(torch.cat(layer.without_gate(products), 1).clone())
        return original(layer, products, batch, state)

    def decoded(rig: TailBench) -> None:
        seq = rig.prefilled(128)
        monkeypatch.setattr(tails, "outputs", noting)
        for at in range(128, 128 + 31):
            rig.step([], [(seq, TOKENS[at])])
        monkeypatch.setattr(tails, "outputs", original)
        for layer, rows in zip(layers(rig), found.values(), strict=True):
            rig.tails.view(layer)[1, :31] = torch.cat(rows)

    assert resumed_wrongly(load, decoded)


def test_tail_outside_slice_is_refused(load: Load) -> None:
    rig = TailBench(load(), TOKENS)
    with pytest.raises(ValueError, match="a tail of tokens 64 to 80 in a slice of 0 to 70"):
        rig.step([Leg(rig.sequence(), 70, keeps=(replace(Keep(64, 80, 0)),))])
