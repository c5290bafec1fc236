"""Tasks to learn recall, memory, styles and tool calls from: seeded, templated, held-out parts kept apart."""

from training.tasks.example import KINDS, Example
from training.tasks.mixture import draw

__all__ = ["KINDS", "Example", "draw"]
