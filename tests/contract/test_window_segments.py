"""Windows composed with segments: the rings of one pass, wherever interiors, seams and windows begin and end."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from headwater.layers.attention import Rotary, WindowAttention
from headwater.mixers.slices import Slice
from tests.contract.layer_rig import relative_error
from tests.contract.test_mixer_segments import PREFIX, REST
from tests.contract.test_mixer_segments import Prompt as Segments
from tests.mixers.window.rig import NONE, Rig, shape_of

SLOT, PLAIN = 5, 6
WINDOWS = (1, 5, 17, 20, 64, 65, 200, 300, 1000)
FORMS = {
    "rotated": shape_of(40),
    "partly rotated": shape_of(40, rotary=Rotary(8)),
    "neighbours": shape_of(40, kv_heads=1, rotary=Rotary(12, neighbours=True)),
    "no positions": shape_of(40, rotary=None),
}
pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")


@dataclass(frozen=True)
class Prompt(Segments):
    """A prompt with segments, which is what a rig's `x` begins with."""

    rest: int = REST

    @property
    def length(self) -> int:
        return self.starts[-1] + self.rest

    def made(self, rig: Rig) -> None:
        for start, end in pairwise(self.starts):
            rig.make(rig.x[start:end], self.head, self.tail)

    def slices(self, first_row: int = 0) -> list[Slice]:
        """Return the slices that are computed around the interiors."""
        row, first, composes, slices = first_row, 0, (), []
        cuts = [*zip(self.starts, self.interiors, strict=False), (self.length - self.head, 0)]
        for i, (start, interior) in enumerate(cuts):
            cut = start + self.head
            if cut > first or i == len(self.interiors):
                slices.append(Slice(row, cut - first, first, SLOT, NONE, 0, composes=composes))
                row, composes = row + cut - first, ()
            composes += ((i, start),)
            first = cut + interior
        return slices

    def rows(self, rig: Rig) -> torch.Tensor:
        return torch.cat([rig.x[s.start : s.end] for s in self.slices()])


def compose(rig: Rig, slot: int, at: int, end: int) -> None:
    """And compute nothing of that sequence; a step has a token of some."""
    rig.run([Slice(0, 0, end, slot, NONE, 0, composes=((0, at),)), Slice(0, 1, 0, 9, NONE, 0)], [], rig.x[:1])


def is_one_pass(shape: WindowAttention, prompt: Prompt, dtype: torch.dtype = torch.float32) -> bool:
    """All that is computed, and the rings after it: keys as close as rotation allows, values bit for bit."""
    rig, slices = Rig(shape, dtype), prompt.slices()
    prompt.made(rig)
    out = rig.run(slices, [], prompt.rows(rig))
    whole = rig.prefill(PLAIN, length=prompt.length)
    wanted = torch.cat([whole[s.start : s.end] for s in slices])
    keys, values = (ring.memory_RWGD[[SLOT, PLAIN]] for ring in rig.rings)
    right = [] if not len(out) else [relative_error(out, wanted.double()) <= 1e-5]
    right += [relative_error(keys[0], keys[1].double()) <= 1e-5, torch.equal(*values)]
    return all(right)


@pytest.mark.parametrize("interior", [1, 17, 64, 200])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_composed_with_a_segment_is_that_of_one_pass(window: int, interior: int) -> None:
    assert is_one_pass(shape_of(window), Prompt((interior,)))


@pytest.mark.parametrize("interior", [1, 17, 64, 200])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_right_behind_an_interior_is_that_of_one_pass(window: int, interior: int) -> None:
    """As where a leg ends with a segment that has no tail: the last slice composes, and computes nothing."""
    prompt = Prompt((interior,), tail=0, rest=0)
    assert prompt.slices()[-1].length == 0
    assert is_one_pass(shape_of(window), prompt)


@pytest.mark.parametrize("window", WINDOWS)
def test_windows_composed_with_several_segments_are_those_of_one_pass(window: int) -> None:
    assert is_one_pass(shape_of(window), Prompt((17, 200, 1, 64)))


@pytest.mark.parametrize("window", WINDOWS)
def test_segments_without_seams_are_composed_by_position(window: int) -> None:
    """One after the other, with nothing computed between them: as with naive addition, and with seams of no tokens."""
    prompt = Prompt((3, 100, 20, 65), head=0, tail=0)
    assert len(prompt.slices()) == 2
    assert is_one_pass(shape_of(window), prompt)


@pytest.mark.parametrize("form", FORMS)
def test_keys_are_rotated_on_as_the_layer_rotates_them(form: str) -> None:
    assert is_one_pass(FORMS[form], Prompt((17, 100)))


def test_without_positions_and_where_nothing_moves_keys_are_copied() -> None:
    for shape, prefix in ((shape_of(40, rotary=None), PREFIX), (shape_of(40), 0)):
        rig = Rig(shape)
        rig.make(rig.x[prefix : prefix + 100], 0, 0)
        rig.prefill(SLOT, length=prefix + 100)
        rig.prefill(PLAIN, length=prefix) if prefix else rig.states.zero(PLAIN)
        compose(rig, PLAIN, prefix, prefix + 100)
        for ring in rig.rings:
            assert relative_error(ring.memory_RWGD[PLAIN], ring.memory_RWGD[SLOT].double()) <= 1e-6
        assert torch.equal(*rig.rings[1].memory_RWGD[[PLAIN, SLOT]])
        assert shape.rotary or torch.equal(*rig.rings[0].memory_RWGD[[PLAIN, SLOT]])


def test_composition_changes_ring_rows_of_the_interior_only() -> None:
    """The head of the segment, which was computed by itself, is in its ring, and is not copied."""
    rig = Rig(shape_of(100))
    rig.prefill(SLOT, length=150)
    before = [ring.memory_RWGD[SLOT].clone() for ring in rig.rings]
    rig.make(torch.randn(60, rig.x.shape[1], generator=torch.Generator().manual_seed(1)), 20, 10)
    compose(rig, SLOT, 130, 180)
    taken = torch.arange(150, 180) % 100
    for ring, was in zip(rig.rings, before, strict=True):
        changed = (ring.memory_RWGD[SLOT] != was).flatten(1).any(dim=1).nonzero().flatten()
        assert torch.equal(changed, taken.sort().values)


def test_in_bfloat16_values_are_copied_bit_for_bit() -> None:
    rig, prompt = Rig(shape_of(100), torch.bfloat16), Prompt((17, 200), rest=0, tail=0)
    prompt.made(rig)
    rig.run(prompt.slices(), [], prompt.rows(rig))
    rig.prefill(PLAIN, length=prompt.length)
    keys, values = (ring.memory_RWGD[[SLOT, PLAIN]] for ring in rig.rings)
    assert torch.equal(*values)
    assert relative_error(keys[0].float(), keys[1].double()) < 2**-6


@pytest.mark.parametrize("window", [5, 65, 300])
def test_a_request_made_of_segments_changes_no_bit_of_others(window: int) -> None:
    prompt = Prompt((17, 64))
    alone, among = Rig(shape_of(window)), Rig(shape_of(window))
    prompt.made(among)
    for rig in (alone, among):
        rig.prefill(7, length=64)
        rig.prefill(8, length=100)
    other = Slice(0, 150, 64, 7, NONE, 0)
    wanted = alone.run([other], [(8, 100)], torch.cat([alone.x[64:214], alone.x[100:101]]))
    first, *others = prompt.slices()
    moved = [Slice(**{**vars(s), "first": s.first + 150}) for s in others]
    rows = [among.x[: first.length], among.x[64:214], *(among.x[s.start : s.end] for s in others), among.x[100:101]]
    other = Slice(first.length, 150, 64, 7, NONE, 0)
    out = among.run([first, other, *moved], [(8, 100)], torch.cat(rows))
    assert torch.equal(out[first.length : first.length + 150], wanted[:-1])
    assert torch.equal(out[-1], wanted[-1])
    assert torch.equal(among.states.bytes_RB[[7, 8]], alone.states.bytes_RB[[7, 8]])


@pytest.mark.parametrize("window", [5, 65, 300])
def test_composed_request_has_equal_bits_in_any_steps_and_batches(window: int) -> None:
    prompt, outs, states = Prompt((17, 64, 40)), [], []
    for together in (True, False):
        rig = Rig(shape_of(window))
        prompt.made(rig)
        slices = prompt.slices()
        if together:
            company = Slice(len(prompt.rows(rig)), 90, 0, 9, NONE, 0)
            rig.prefill(8, length=100)
            rows = torch.cat([prompt.rows(rig), rig.x[:90], rig.x[100:101]])
            outs.append(rig.run([*slices, company], [(8, 100)], rows)[:-91])
        else:
            apart = [Slice(**{**vars(s), "first": 0}) for s in slices]
            outs.append(torch.cat([rig.run([s], [], rig.x[s.start : s.end]) for s in apart]))
        states.append(rig.states.bytes_RB[SLOT].clone())
    assert torch.equal(*outs)
    assert torch.equal(*states)


@pytest.mark.parametrize("window", WINDOWS)
def test_slices_may_be_cut_anywhere(window: int) -> None:
    """Several of one slot are one sequence: it sees across their ends."""
    rig = Rig(shape_of(window))
    whole = rig.prefill(PLAIN, length=300)
    slices = [Slice(a, b - a, a, SLOT, NONE, 0) for a, b in pairwise((0, 1, 3, 70, 71, 200, 300))]
    out = rig.run(slices, [], rig.x[:300])
    assert relative_error(out, whole.double()) < 1e-5
    assert torch.equal(rig.states.bytes_RB[SLOT], rig.states.bytes_RB[PLAIN])
