"""Verification of drafts: which rows of a step's logits are whose."""

import threading
from types import SimpleNamespace

import torch

from headwater.engine.verification import Verification


def test_rows_of_a_request_follow_those_of_one_that_ended() -> None:
    """A request may end while its step runs: its rows, one and one after each draft, are passed over."""
    ended, other = (
        SimpleNamespace(seq=SimpleNamespace(id=number), drafts=drafts) for number, drafts in ((1, (5, 6)), (2, ()))
    )
    live = {number: SimpleNamespace(drafted=0) for number in (1, 2)}
    failed: list[object] = []
    answering = SimpleNamespace(live=live, fail_sampling=lambda reached, error: failed.extend(reached))
    verification, sampled_rows = Verification(answering, SimpleNamespace(), threading.Condition()), list[int]()

    def choices(logits: object, rows: list[int], reached: list[object]) -> list[object]:
        sampled_rows.extend(rows)
        raise ValueError("seen enough")

    verification.choices = choices
    verification.sample([ended, other], [other.seq], torch.zeros(4, 8))
    assert sampled_rows == [3]
    assert failed == [live[2]]
    assert live[1].drafted == 0
