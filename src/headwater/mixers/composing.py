"""A state composed with segments that were computed apart (HYPIC, section 4.2, equations 6 and 7).

T is the transition of a segment's interior, S₀ the state that it makes of zeros, both computed as if the segment began
at position 0. X shape of a layer's state or transition, C channels, w inputs that its convolution looks back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headwater.mixers.batch import Slice

if TYPE_CHECKING:
    from headwater.mixers.recurrent import LayerState, RecurrentMixer


@dataclass(frozen=True)
class SegmentState:
    """What one recurrent layer stores of a segment."""

    transition_X: torch.Tensor | None  # T; None: it is taken for the identity
    zero_start_X: torch.Tensor  # S₀
    conv_Cw: torch.Tensor | None  # the convolution's last inputs, where there is one


def composed(mixer: RecurrentMixer[Any], state_X: torch.Tensor, segment: SegmentState, at: int) -> torch.Tensor:
    """T·S + R(at)·S₀: the state after a segment that begins at position `at`, from the one before it."""
    moved_X = mixer.moved(segment.zero_start_X, at)
    if segment.transition_X is None:
        return state_X + moved_X
    return mixer.carried(segment.transition_X, state_X).add_(moved_X)


def zero_start(
    mixer: RecurrentMixer[Any], end_X: torch.Tensor, transition_X: torch.Tensor, head_X: torch.Tensor
) -> torch.Tensor:
    """S₀ = S_end − T·S_head, of the states after a segment's interior and before it."""
    return end_X - mixer.carried(transition_X, head_X)


def compose_into(mixer: RecurrentMixer[Any], state: LayerState, slices: Sequence[Slice]) -> None:
    """What stands in the slots of slices becomes the states after the segments that they compose with."""
    for s in slices:
        for index, at in s.composes:
            segment = state.segments[index]
            state.recurrent[s.slot] = composed(mixer, state.recurrent[s.slot], segment, at)
            if state.conv is not None and segment.conv_Cw is not None:
                state.conv[s.slot] = segment.conv_Cw
