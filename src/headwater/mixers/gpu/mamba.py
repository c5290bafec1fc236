"""Mamba-1 on a GPU: token after token, in Triton; a program keeps the states of some channels in registers.

Steps, B and C of all tokens are made before, by products with weights.

S slices, P prefill rows, B decoding sequences, E states a channel, C channels, R rows of the state memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headwater.mixers.gpu import dense
from headwater.mixers.gpu.ragged import Ragged
from headwater.mixers.mamba import SelectiveStateSpace
from headwater.mixers.slices import CHUNK

CHANNELS = 64  # of a program


@triton.jit
def _token(x, dt, b, c, rate_EC, skip_C, h_EC, row, n_channels, channel, e, n_states: tl.constexpr):
    """Take one token: return the new states, and what it reads."""
    inside = channel < n_channels
    at = row * n_channels + channel
    x_C = tl.load(x + at, mask=inside, other=0.0)
    dt_C = tl.load(dt + at, mask=inside, other=0.0)
    b_E = tl.load(b + row * n_states + e, mask=e < n_states, other=0.0)
    c_E = tl.load(c + row * n_states + e, mask=e < n_states, other=0.0)
    h_EC = tl.exp2(dt_C[None, :] * rate_EC) * h_EC + b_E[:, None] * (dt_C * x_C)[None, :]
    return h_EC, tl.sum(c_E[:, None] * h_EC, 0) + skip_C * x_C


@triton.jit
def _advance(
    x, dt, b, c, rate, skip, out, state, first_S, length_S, slot_S, chunk_S, save_n, n_channels, state_row,
    n_states: tl.constexpr, padded: tl.constexpr, channels: tl.constexpr, t: tl.constexpr,
):  # fmt: skip
    """All tokens of one slice in order, for some channels."""
    which = tl.program_id(0)
    channel, e = tl.program_id(1) * channels + tl.arange(0, channels), tl.arange(0, padded)
    inside = channel < n_channels
    in_state = (e < n_states)[:, None] & inside[None, :]
    at_state = e[:, None] * n_channels + channel[None, :]
    rate_EC = tl.load(rate + at_state, mask=in_state, other=0.0)
    skip_C = tl.load(skip + channel, mask=inside, other=0.0)
    first, length = tl.load(first_S + which).to(tl.int64), tl.load(length_S + which)
    slot, chunk = tl.load(slot_S + which).to(tl.int64), tl.load(chunk_S + which)
    h_EC = tl.load(state + slot * state_row + at_state, mask=in_state, other=0.0)
    for i in range(length):
        row = first + i
        h_EC, read_C = _token(x, dt, b, c, rate_EC, skip_C, h_EC, row, n_channels, channel, e, n_states)
        tl.store(out + row * n_channels + channel, read_C, mask=inside)
        if (i + 1) % t == 0 or i + 1 == length:
            save = tl.load(save_n + chunk + i // t).to(tl.int64)
            tl.store(state + save * state_row + at_state, h_EC, mask=in_state & (save + 0 * e[:, None] >= 0))
    tl.store(state + slot * state_row + at_state, h_EC, mask=in_state)


@triton.jit
def _decode(
    x, dt, b, c, rate, skip, out, state, slot_B, n_channels, state_row,
    n_states: tl.constexpr, padded: tl.constexpr, channels: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel, e = tl.program_id(1) * channels + tl.arange(0, channels), tl.arange(0, padded)
    inside = channel < n_channels
    in_state = (e < n_states)[:, None] & inside[None, :]
    at_state = e[:, None] * n_channels + channel[None, :]
    rate_EC = tl.load(rate + at_state, mask=in_state, other=0.0)
    skip_C = tl.load(skip + channel, mask=inside, other=0.0)
    to = state + tl.load(slot_B + row).to(tl.int64) * state_row + at_state
    h_EC = tl.load(to, mask=in_state, other=0.0)
    h_EC, read_C = _token(x, dt, b, c, rate_EC, skip_C, h_EC, row, n_channels, channel, e, n_states)
    tl.store(to, h_EC, mask=in_state)
    tl.store(out + row * n_channels + channel, read_C, mask=inside)


class SelectiveStateSpaceKernels:
    """The kernels of one `SelectiveStateSpace` layer, with their launches."""

    def __init__(self, mixer: SelectiveStateSpace) -> None:
        self.mixer, self.shape = mixer, mixer.shape

    def prefill(self, mixed_PC: Tensor, gates_P1: Tensor, state_REC: Tensor, ragged: Ragged) -> Tensor:
        """Return the outputs of all slices' rows, [P, C]; write their slots and the rows of saves."""
        given, out_PC, widths = self._arguments(mixed_PC, prefill=True)
        _advance[len(ragged.first_S), triton.cdiv(self.shape.inner, CHANNELS)](
            *given, state_REC, ragged.first_S, ragged.length_S, ragged.slot_S, ragged.chunk_S, ragged.save_n,
            self.shape.inner, state_REC.stride(0), t=CHUNK, **widths,
        )  # fmt: skip
        return out_PC

    def decode(self, mixed_BC: Tensor, gates_B1: Tensor, state_REC: Tensor, slot_B: Tensor) -> Tensor:
        """Process one token of each of B sequences, [B, C]; update their slots in place."""
        given, out_BC, widths = self._arguments(mixed_BC, prefill=False)
        _decode[len(slot_B), triton.cdiv(self.shape.inner, CHANNELS)](
            *given, state_REC, slot_B, self.shape.inner, state_REC.stride(0), **widths
        )
        return out_BC

    def _arguments(self, mixed_NC: Tensor, prefill: bool) -> tuple[tuple[Tensor, ...], Tensor, dict[str, int]]:
        """Return the tensors that both kernels take, the output among them, and widths."""
        mixed_NC = dense(mixed_NC)
        steps = map(dense, self.mixer.steps(mixed_NC, prefill))
        out_NC, n_states = mixed_NC.new_empty(mixed_NC.shape), self.shape.state
        given = (mixed_NC, *steps, self.mixer.log2_rate_EC, self.mixer.skip_C, out_NC)
        widths = {"n_states": n_states, "padded": triton.next_power_of_2(n_states), "channels": CHANNELS}
        return given, out_NC, widths
