"""Decode steps that can be computed: each sequence has a slot of its own, and its rows follow one another."""

import re

import pytest
import torch

from headwater.mixers.batch import STATE, StepBatch

NONE = torch.empty(0, dtype=torch.int64)


def step(
    slots: list[int], parents: tuple[int, ...] = (), drafted: tuple[int, ...] = (), accepted: tuple[int, ...] = ()
) -> StepBatch:
    rows = torch.arange(len(slots))
    slot_B, tables = torch.tensor(slots), (NONE,) * len(slots)
    return StepBatch(rows, rows, (), slot_B, tables, NONE, parents=parents, drafted=drafted, accepted=accepted)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((STATE,), "2 decoding rows have 1 parents"),
        ((1, STATE), "decoding row 0 continues row 1: it may continue only the row before it"),
        ((-2, 0), "decoding row 0 continues row -2: it may continue only the row before it"),
        ((STATE, 1), "decoding row 1 continues row 1: it may continue only the row before it"),
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
    slots, firsts, drafts = batch.decode_sequences
    assert (slots.tolist(), firsts.tolist(), drafts.tolist()) == ([7, 2, 5], [0, 3, 4, 6], [3, 4, 6])
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
        assert [part.tolist() for part in batch.decode_sequences] == [[7, 2, 5], [0, 1, 2, 3], [1, 2, 3]]
    assert step([]).decode_parts == ()


THREE = [7, 7, 7, 2, 5, 5], (STATE, 0, 1, STATE, STATE, 4)  # rows of three sequences


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"drafted": (1, 0)}, "3 decoding sequences, and drafts of 2"),
        ({"accepted": (1,)}, "3 decoding sequences, and accepted drafts of 1"),
        ({"drafted": (1, 1, 0)}, "1 drafts in 1 rows of the sequence that begins with row 3"),
        ({"drafted": (-1, 0, 0)}, "-1 drafts in 3 rows of the sequence that begins with row 0"),
    ],
)
def test_drafts_that_no_sequence_has_are_refused(counts: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        step(*THREE, **counts)


def test_drafts_are_a_sequences_last_rows() -> None:
    batch = step(*THREE, drafted=(2, 0, 1))
    assert batch.decode_sequences[2].tolist() == [1, 4, 5]
    drafts = batch.draft_rows
    parts = drafts.row_A, drafts.slot_A, drafts.number_A
    assert [part.tolist() for part in parts] == [
        [1, 2, 5],
        [7, 7, 5],
        [0, 1, 0],
    ]
    (true_B, true), (draft_B, drafted) = batch.true_and_drafted
    assert (true_B.tolist(), true.decode_slot_B.tolist(), true.parents) == ([0, 3, 4], [7, 2, 5], (STATE,) * 3)
    assert (draft_B.tolist(), drafted.decode_slot_B.tolist()) == ([1, 2, 5], [7, 7, 5])
    assert (drafted.parents, drafted.position_N.tolist()) == ((STATE, 0, STATE), [1, 2, 5])


def test_accepted_drafts_come_before_a_sequences_own_rows() -> None:
    whole = step(*THREE, drafted=(2, 0, 1), accepted=(0, 2, 1)).with_accepted
    assert whole.own_B.tolist() == [0, 1, 2, 5, 7, 8]
    assert whole.accepted.row_A.tolist() == [3, 4, 6]
    assert whole.accepted.slot_A.tolist() == [2, 2, 5]
    assert whole.accepted.number_A.tolist() == [0, 1, 0]
    batch = whole.batch
    assert batch.decode_slot_B.tolist() == [7, 7, 7, 2, 2, 2, 5, 5, 5]
    assert batch.position_N.tolist() == [0, 1, 2, 1, 2, 3, 3, 4, 5]
    assert batch.parents == (STATE, 0, 1, STATE, 3, 4, STATE, 6, 7)
    assert [part.tolist() for part in batch.decode_sequences] == [[7, 2, 5], [0, 3, 6, 9], [1, 6, 8]]
