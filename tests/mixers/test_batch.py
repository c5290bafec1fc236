"""Decode steps that can be computed: each sequence has a slot of its own, and its rows follow one another."""

from __future__ import annotations

import re

import pytest
import torch

from headwater.mixers.batch import STATE, StepBatch

NONE = torch.empty(0, dtype=torch.int64)


def step(slots: list[int], parents: tuple[int, ...] = ()) -> StepBatch:
    rows = torch.arange(len(slots))
    return StepBatch(NONE, rows, (), torch.tensor(slots), (NONE,) * len(slots), NONE, parents=parents)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((STATE,), "2 decoding rows have 1 parents"),
        ((1, STATE), "decoding row 0 continues row 1: it may continue the one before it alone"),
        ((-2, 0), "decoding row 0 continues row -2: it may continue the one before it alone"),
        ((STATE, 1), "decoding row 1 continues row 1: it may continue the one before it alone"),
    ],
)
def test_rows_that_do_not_follow_one_another_are_refused(parents: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        step([3, 3], parents)


@pytest.mark.parametrize(
    ("slots", "parents", "message"),
    [
        ([3, 4, 3], (), "3 decoding sequences have slots [3, 4, 3]: each needs one of its own"),
        (
            [3, 3, 4, 3],
            (STATE, 0, STATE, STATE),
            "3 decoding sequences have slots [3, 4, 3]: each needs one of its own",
        ),
        ([3, 4], (STATE, 0), "decoding row 1 continues row 0: its slot is 4, that row's is 3"),
    ],
)
def test_slots_of_which_an_update_would_be_lost_are_refused(
    slots: list[int], parents: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        step(slots, parents).check_slots()


def test_rows_of_sequences_are_found() -> None:
    batch = step([7, 7, 7, 2, 5, 5], (STATE, 0, 1, STATE, STATE, 4))
    slots, firsts = batch.decode_sequences
    assert (slots.tolist(), firsts.tolist()) == ([7, 2, 5], [0, 3, 4, 6])
    parts = [(at, part.decode_slot_B.tolist(), part.position_N.tolist()) for at, part in batch.decode_parts]
    assert parts == [
        (slice(0, 1), [7], [0]),
        (slice(1, 2), [7], [1]),
        (slice(2, 5), [7, 2, 5], [2, 3, 4]),
        (slice(5, 6), [5], [5]),
    ]


def test_rows_of_as_many_sequences_are_one_part() -> None:
    for batch in (step([7, 2, 5]), step([7, 2, 5], (STATE,) * 3)):
        assert batch.decode_parts == ((slice(0, 3), batch),)
        assert [part.tolist() for part in batch.decode_sequences] == [[7, 2, 5], [0, 1, 2, 3]]
    assert step([]).decode_parts == ()
