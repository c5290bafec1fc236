"""Attention over rings by kernels: close to torch's, with bits that depend only on a row's own sequence."""

import pytest
import torch

pytest.importorskip("numba", reason="numba is not installed")

from headwater.kernels import attention
from headwater.layers.attention import Rotary
from headwater.mixers import window as windows
from headwater.mixers.batch import StepBatch
from headwater.mixers.cpu.attention import WindowAttentionOnCpu
from headwater.mixers.rotary import TABLE_BLOCK
from headwater.mixers.slices import Slice
from headwater.mixers.weights import Weights
from tests.mixers.window.rig import NONE, Rig, shape_of

LENGTHS = (1, 39, 40, 41, 100, 129, 300, 513)  # tokens of the sequence in each slot
STEPS = 3


class KernelRig(Rig):
    """The same layer with kernels."""

    def __init__(self, shape, dtype=torch.float32):
        super().__init__(shape, dtype)
        self.layer = WindowAttentionOnCpu(shape, Weights(self.tensors, dtype))


def decoded(rig, groups):
    """Prefill all slots, then decode some tokens of each, these slots together; return [steps, slots, C]."""
    for slot, length in enumerate(LENGTHS):
        rig.run([Slice(0, length, 0, slot, NONE, 0)], [], rig.x[:length])
    outputs = torch.empty(STEPS, len(LENGTHS), rig.x.shape[1], dtype=rig.dtype)
    for step in range(STEPS):
        for slots in groups:
            rows = [(slot, LENGTHS[slot] + step) for slot in slots]
            outputs[step, slots] = rig.run([], rows, rig.x[[position for _, position in rows]])
    return outputs


ALL = list(range(len(LENGTHS)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize(("window", "sinks"), [(1, False), (40, False), (128, True), (300, False)])
def test_decode_is_as_torchs(window, sinks, dtype, tolerance):
    shape = shape_of(window, sinks=sinks)
    by_torch, by_kernels = Rig(shape, dtype), KernelRig(shape, dtype)
    wanted, got = decoded(by_torch, [ALL]), decoded(by_kernels, [ALL])
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    for ring, expected in zip(by_kernels.rings, by_torch.rings, strict=True):
        of_slots = slice(0, len(LENGTHS))
        torch.testing.assert_close(
            ring.memory_RWGD[of_slots], expected.memory_RWGD[of_slots], rtol=tolerance, atol=tolerance
        )


def test_prompts_are_computed_by_torch():
    by_torch, by_kernels = Rig(shape_of(100)), KernelRig(shape_of(100))
    assert torch.equal(by_kernels.prefill(0, (64, 320)), by_torch.prefill(0, (64, 320)))


@pytest.mark.parametrize("window", [40, 300])
def test_company_changes_no_bit(window, monkeypatch):
    together = decoded(KernelRig(shape_of(window)), [ALL])
    assert torch.equal(decoded(KernelRig(shape_of(window)), [[slot] for slot in ALL]), together)
    assert torch.equal(decoded(KernelRig(shape_of(window)), [[5, 2], [7, 0, 1], [6, 4, 3]]), together)
    attend = attention.attend
    monkeypatch.setattr(attention, "attend", lambda q, *args: attend(q * (1 + 1e-6 * (len(args[3]) == 2)), *args))
    assert not torch.equal(decoded(KernelRig(shape_of(window)), [[5, 2], [7, 0, 1], [6, 4, 3]]), together)


@pytest.mark.parametrize("of", [Rig, KernelRig])
@pytest.mark.parametrize("window", [1, 40, 300])
def test_window_attention_of_several_tokens_in_one_step_equals_them_in_turn(window, of):
    rows = [(slot, LENGTHS[slot] + i) for slot, n in ((1, 5), (3, 1), (7, 3)) for i in range(n)]
    outputs, rings = [], []
    for steps in ([rows], [[row] for row in rows], [rows[:3], rows[3:7], rows[7:]]):
        rig = of(shape_of(window))
        decoded(rig, [])
        outputs.append(torch.cat([rig.run([], step, rig.x[[position for _, position in step]]) for step in steps]))
        rings.append(torch.stack([ring.memory_RWGD[[1, 3, 7]] for ring in rig.rings]))
    assert all(torch.equal(other, outputs[0]) for other in outputs)
    assert all(torch.equal(other, rings[0]) for other in rings)


@pytest.mark.parametrize("of", [Rig, KernelRig])
def test_a_ring_that_two_sequences_have_is_refused(of):
    rig = of(shape_of(40))
    with pytest.raises(ValueError, match=r"^3 decoding sequences have slots \[1, 2, 1\]: each needs one of its own$"):
        rig.run([], [(1, 39), (2, 40), (1, 40)], rig.x[:3])


@pytest.mark.parametrize("of", [Rig, KernelRig])
def test_ring_shared_by_sequences_in_different_parts_is_refused(of):
    rig, rows = of(shape_of(40)), [(1, 39), (1, 40), (2, 40), (2, 41), (1, 41)]
    with pytest.raises(ValueError, match=r"^3 decoding sequences have slots \[1, 2, 1\]: each needs one of its own$"):
        rig.run([], rows, rig.x[:5])


def test_a_ring_that_is_written_before_it_is_read_is_found(monkeypatch):
    """The control: all tokens of a step are in the ring before the first of them reads it."""
    rows = [(1, LENGTHS[1] + i) for i in range(5)]
    rig, early = (KernelRig(shape_of(20)) for _ in range(2))
    for each in (rig, early):
        decoded(each, [])
    wanted = rig.run([], rows, rig.x[39:44])
    monkeypatch.setattr(StepBatch, "decode_parts", property(lambda batch: ((batch.decode_rows, batch),)))
    assert not torch.equal(early.run([], rows, early.x[39:44]), wanted)


def test_positions_beyond_the_window_and_the_first_block_of_angles_are_rotated():
    """The kernel comes first: torch would compute the angles."""
    shape, position = shape_of(40, rotary=Rotary(16, theta=777.0)), TABLE_BLOCK + 5
    by_kernels, by_torch = KernelRig(shape), Rig(shape)
    for rig in (by_kernels, by_torch):
        for ring in rig.rings:
            ring.memory_RWGD.copy_(torch.randn(ring.memory_RWGD.shape, generator=torch.Generator().manual_seed(4)))
    got, wanted = (rig.run([], [(3, position)], rig.x[:1]) for rig in (by_kernels, by_torch))
    torch.testing.assert_close(got, wanted, rtol=3e-5, atol=3e-5)


def test_layers_with_the_same_window_group_the_rows_of_each_part_once(monkeypatch):
    grouped, group = [], windows.decode_batches
    monkeypatch.setattr(windows, "decode_batches", lambda *args: grouped.append(args) or group(*args))
    rig = Rig(shape_of(40))
    decoded(rig, [])
    rows, run = [(1, 39), (1, 40), (1, 41), (3, 41)], rig.layer.forward
    monkeypatch.setattr(rig.layer, "forward", lambda *args: [run(*args) for _ in range(3)][-1])  # as three layers
    rig.run([], rows, rig.x[:4])
    assert len(grouped) == 3
