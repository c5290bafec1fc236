"""Finding tags in text that comes in pieces."""

from __future__ import annotations


def may_become(text: str, tag: str) -> bool:
    """Whether more text could turn this one into one that begins with the tag. It does not yet."""
    return len(text) < len(tag) and tag.startswith(text)


def possible_start(text: str, *tags: str) -> int:
    """Where the longest end of `text` begins that one of the tags also begins with; its length if none does."""
    longest = max(map(len, tags))
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if any(may_become(text[start:], tag) for tag in tags):
            return start
    return len(text)
