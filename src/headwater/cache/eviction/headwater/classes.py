"""Classes of checkpoints that are reused alike: by branches below, by uses, and by depth."""

from __future__ import annotations

import numpy as np

from headwater.cache.node import Node

MAX_USES = 255  # that are counted
BRANCH_CLASSES, DEPTH_CLASSES = 3, 7  # no branch, 1, more; below 256 tokens, 1,024 and so on
# 1 + uses that the prior assumes, by class: none, another's work, 1, 2-3, 4-7, more; none at a learned position
PRIOR_USES = np.array([1, 2, 2, 3, 3, 3, 4])
LEARNED_CLASS = (len(PRIOR_USES) - 1) * DEPTH_CLASSES
CLASSES_OF_A_BRANCH = len(PRIOR_USES) * DEPTH_CLASSES
CLASS_OF_USES = [
    DEPTH_CLASSES * (uses if uses < 2 else min(len(PRIOR_USES) - 2, 1 + (uses - 1).bit_length()))
    for uses in range(MAX_USES + 1)
]
CLASS_OF_DEPTH_BITS = [min(DEPTH_CLASSES - 1, max(0, bits - 1) // 2) for bits in range(64)]  # depth in 64 tokens

# Bits of a mark: all but times and depth on which class and worth of a node's checkpoint depend
BRANCHES_MARK, PARENT, EXISTS, HELD, SPECULATIVE, LEAF = 0xE0, 16, 8, 4, 2, 1


def class_of(node: Node, uses: int, unit_tokens: int) -> int:
    """Return the class of a node's checkpoint."""
    live = node.live
    of_branches = CLASSES_OF_A_BRANCH * ((live if live < BRANCH_CLASSES else BRANCH_CLASSES) - 1)
    of_uses = LEARNED_CLASS if node.learned and not uses else CLASS_OF_USES[uses]
    return of_branches + of_uses + CLASS_OF_DEPTH_BITS[(node.end * unit_tokens >> 6).bit_length()]


def class_of_ghost(kind: int, uses: int, is_deepest: bool) -> int:
    """Return the class of a used ghost entry that was of class `kind`.

    If no checkpoint of the prompt had been evicted, one above the deepest would have a branch below it.
    """
    branches, rest = divmod(kind, CLASSES_OF_A_BRANCH)
    if not is_deepest:
        branches = max(1, branches)
    return branches * CLASSES_OF_A_BRANCH + CLASS_OF_USES[uses] + rest % DEPTH_CLASSES


def used(uses: int, is_request: bool) -> int:
    """Return the number of uses after one more: 0 none, 1 other work than requests', else 1 more than requests."""
    return min(MAX_USES, max(2, uses + 1)) if is_request else max(1, uses)


def mark_of(node: Node) -> int:
    """Return the mark of a node with a checkpoint, 1 to 255. It has the lowest bits of the number of branches."""
    mark = (node.live & 7) << 5 | EXISTS
    if node.children:
        mark |= PARENT
    elif not node.pins and node.parent is not None:
        mark |= LEAF
    if node.holds:
        mark |= HELD
    if node.speculative:
        mark |= SPECULATIVE
    return mark
