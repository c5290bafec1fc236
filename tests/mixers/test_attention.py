"""Paged attention against a plain one, and against itself in other cuts, tables and company."""

import pytest
import torch

from headwater.layers.attention import GroupedAttention, Rotary
from headwater.layers.rotary_scaling import Yarn
from headwater.mixers.rotary import TABLE_BLOCK, RotaryTable, rotary_table, rotate_into
from headwater.mixers.slices import Slice
from tests.mixers.attention_rig import GroupedRig

HIDDEN, WIDTH = 48, 96
LENGTH, DECODED = 1100, 6
DEFAULT = "gate and norms"
SHAPES = {
    "no positions": GroupedAttention(HIDDEN, 4, 2, 16),
    "biases": GroupedAttention(HIDDEN, 4, 2, 16, bias=True, out_bias=True, rotary=Rotary(16)),
    "scale": GroupedAttention(HIDDEN, 6, 3, 16, scale=0.7, rotary=Rotary(16, theta=500.0)),
    "norms": GroupedAttention(HIDDEN, 4, 2, 16, normed=True, norm_eps=1e-5, norm_offset=1.0, rotary=Rotary(16)),
    "neighbours": GroupedAttention(HIDDEN, 4, 1, 24, rotary=Rotary(16, neighbours=True)),
    "some channels": GroupedAttention(HIDDEN, 4, 4, 24, rotary=Rotary(10)),
    "gate": GroupedAttention(HIDDEN, 4, 2, 16, gated=True, bias=True, rotary=Rotary(8)),
    "one head": GroupedAttention(HIDDEN, 1, 1, 16, rotary=Rotary(16)),
    "odd heads on one": GroupedAttention(HIDDEN, 5, 1, 16, rotary=Rotary(16)),
    "sinks": GroupedAttention(HIDDEN, 6, 2, 16, sinks=True, bias=True, out_bias=True, rotary=Rotary(16)),
    DEFAULT: GroupedAttention(WIDTH, 6, 2, 32, gated=True, normed=True, norm_offset=1.0, rotary=Rotary(8)),
    "odd heads, gate and norms": GroupedAttention(WIDTH, 5, 1, 24, gated=True, normed=True, rotary=Rotary(6)),
    "as many heads of keys": GroupedAttention(WIDTH, 6, 6, 32, gated=True, normed=True, rotary=Rotary(8)),
}
DTYPES = [torch.float32, torch.bfloat16]
AMONG_OTHERS = (
    DEFAULT,
    "as many heads of keys",
    "one head",
    "odd heads on one",
    "neighbours",
    "some channels",
    "sinks",
)


def rig_of(name: str, dtype: torch.dtype = torch.float32, page_size: int = 64, length: int = LENGTH) -> GroupedRig:
    return GroupedRig(SHAPES[name], length, dtype, page_size)


def table_of(n_tokens: int, seed: int = 0, n_pages: int = 64) -> torch.Tensor:
    return torch.randperm(n_pages, generator=torch.Generator().manual_seed(seed))[: -(-n_tokens // 64)]


@pytest.mark.parametrize("name", SHAPES)
def test_prefill_and_decode_agree_with_the_formulas(name: str) -> None:
    length = LENGTH if SHAPES[name].gated and SHAPES[name].normed else 156  # without norms, errors grow with angles
    rig, table = rig_of(name, length=length), table_of(length)
    rows = [rig.prefill(table, [], length - DECODED)]
    rows += [rig.run([], [(p, table)], rig.x[p : p + 1]) for p in range(length - DECODED, length)]
    assert (torch.cat(rows).double() - rig.plain()).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_cuts_and_tables_change_no_bit(dtype: torch.dtype) -> None:
    whole = rig_of(DEFAULT, dtype).prefill(table_of(LENGTH), [])
    assert not whole.isnan().any(), "read what was never written"
    every_page = list(range(64, LENGTH, 64))
    for i, bounds in enumerate([[64], [512], [448, 576], [1088], every_page]):
        assert torch.equal(rig_of(DEFAULT, dtype).prefill(table_of(LENGTH, seed=i), bounds), whole), bounds


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_end_of_a_slice_changes_no_bit(dtype: torch.dtype) -> None:
    whole = rig_of(DEFAULT, dtype).prefill(table_of(LENGTH), [])
    for length in (1, 2, 5, 63, 65, 200, 511, 513, 700):
        assert torch.equal(rig_of(DEFAULT, dtype).prefill(table_of(LENGTH), [], length), whole[:length]), length


def test_pages_of_any_size_give_the_same_bits() -> None:
    wanted = rig_of("norms").prefill(table_of(LENGTH), [])
    for page_size in (128, 192):
        assert torch.equal(rig_of("norms", page_size=page_size).prefill(torch.arange(9), []), wanted), page_size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", AMONG_OTHERS)
def test_decode_is_equal_by_itself_and_among_others(name: str, dtype: torch.dtype) -> None:
    """Include layers of one KV head: a single product of theirs would be spread over threads."""
    lengths = [1, 2, 64, 65, 300, 511, 512, 513]

    def rig_with_prefixes() -> tuple[GroupedRig, list[tuple[int, torch.Tensor]]]:
        rig, decodes = rig_of(name, dtype), []
        pages = torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist()
        for length in lengths:
            table = torch.tensor([pages.pop() for _ in range(-(-length // 64))])
            if length > 1:
                rig.run([Slice(0, length - 1, 0, 0, table, 0)], [], rig.x[: length - 1])
            decodes.append((length - 1, table))
        return rig, decodes

    rig, decodes = rig_with_prefixes()
    x = rig.x[:8].flip(0)
    together = rig.run([], decodes, x)
    assert not together.isnan().any()
    rig, decodes = rig_with_prefixes()
    alone = torch.cat([rig.run([], [decode], x[i : i + 1]) for i, decode in enumerate(decodes)])
    assert torch.equal(together, alone)


def test_pages_before_write_from_are_read_and_not_written() -> None:
    rig = rig_of(DEFAULT)
    table = table_of(LENGTH)
    whole = rig.prefill(table, [])
    before = rig.arena.pages.clone()
    rig.x = rig.x.clone()
    again = rig.run([Slice(0, LENGTH - 128, 128, 0, table, 6)], [], rig.x[128:])
    assert torch.equal(again, whole[128:])
    rig.x += 1.0
    rig.run([Slice(0, 640 - 128, 128, 0, table[:10], 6)], [], rig.x[128:640])
    changed = [page for page in range(64) if not torch.equal(rig.arena.pages[page], before[page])]
    assert sorted(changed) == sorted(table[6:10].tolist())


def test_a_slice_that_writes_nothing_is_computed() -> None:
    rig = rig_of(DEFAULT)
    table = table_of(LENGTH)
    whole = rig.prefill(table, [])
    again = rig.run([Slice(0, 256, 64, 0, table[:5], 5)], [], rig.x[64:320])
    assert torch.equal(again, whole[64:320])


def test_rotation_depends_only_on_the_position() -> None:
    rotary = SHAPES[DEFAULT].rotary
    long, short = RotaryTable(rotary, "cpu"), RotaryTable(rotary, "cpu")
    position = torch.tensor([0, 5, TABLE_BLOCK - 1, TABLE_BLOCK + 3])
    at_once = long.at(position)
    for i in range(len(position)):
        assert torch.equal(short.at(position[i : i + 1])[0], at_once[i])


def test_a_table_of_rotations_is_copied_once_for_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix of 128,000 tokens that is loaded needs 32 blocks at once."""
    rotary = SHAPES[DEFAULT].rotary
    at_once, by_block = RotaryTable(rotary, "cpu"), RotaryTable(rotary, "cpu")
    joined, cat = [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts: (joined.append(len(parts)), cat(parts))[1])
    table = at_once.until(3 * TABLE_BLOCK + 1)
    assert joined == [1 + 4]
    assert at_once.until(4 * TABLE_BLOCK) is table
    for end in range(1, 4 * TABLE_BLOCK + 1, TABLE_BLOCK):
        by_block.until(end)
    assert by_block.until(1).equal(table)


@pytest.mark.parametrize(("neighbours", "amplitude"), [(False, 1.0), (True, 1.0), (False, 1.3)])
@pytest.mark.parametrize("by", [0, 1, 63, 5_000, 100_000])
def test_key_rotated_again_is_the_key_at_that_position(by: int, neighbours: bool, amplitude: float) -> None:
    rotary = Rotary(32, neighbours=neighbours, scaling=Yarn(4.0, 512), amplitude=amplitude)
    table = rotary_table(rotary, "cpu")
    k_TGD = torch.randn(200, 3, 48, generator=torch.Generator().manual_seed(0))
    from_T = torch.arange(200)
    moved_TGD, wanted_TGD = k_TGD.clone(), k_TGD.clone()
    rotate_into(moved_TGD, table.at(from_T), neighbours)
    rotate_into(moved_TGD, table.between(from_T, from_T + by), neighbours)
    rotate_into(wanted_TGD, table.at(from_T + by), neighbours)
    assert (moved_TGD - wanted_TGD).abs().max() < 1e-6 * wanted_TGD.abs().max()


def test_one_turn_for_all_is_that_of_position_zero() -> None:
    """But for the rounding of the table's angles, at most half of the last place of a float32 below twice `by`."""
    table = rotary_table(Rotary(32), "cpu")
    for by in (0, 1, 77, 4_000):
        turn = table.between(torch.tensor([0]), torch.tensor([by]))
        assert (table.turn(by) - turn).abs().max() < 1e-6 + by * 2**-24
