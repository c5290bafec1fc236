"""Answers of a batch that are right in every token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import groupby

import torch

from training.source import LABELS, OTHER, PROMPT
from training.tasks.example import TEXT


def answers(label_BT: torch.Tensor, right_BT: torch.Tensor) -> dict[str, list[bool]]:
    """For each kind of question, of each answer whether all its tokens are right. `label_BT`: places in LABELS."""
    found: dict[str, list[bool]] = defaultdict(list)
    for label_T, right_T in zip(label_BT.tolist(), right_BT.tolist(), strict=True):
        for label, run in groupby(zip(label_T, right_T, strict=True), key=lambda pair: pair[0]):
            if LABELS[label] not in (PROMPT, OTHER, TEXT):
                found[LABELS[label]].append(all(right for _, right in run))
    return found


def shares(found: Mapping[str, list[bool]]) -> dict[str, float]:
    """`n_KIND`: how many answers there are; `right_KIND`: the share of them that is right."""
    measured: dict[str, float] = {}
    for kind, right in found.items():
        measured |= {f"n_{kind}": len(right), f"right_{kind}": sum(right) / len(right)}
    return measured
