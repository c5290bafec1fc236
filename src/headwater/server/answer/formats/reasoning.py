"""Tags of reasoning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Tags that enclose a family's reasoning. Line ends next to them are markup, as in chat templates."""

    open: str
    close: str
    models: tuple[str, ...] = ()  # models that write it although their chat templates do not; named in those templates

    def used_by(self, template: str) -> bool:
        """Return whether a chat template writes this format, or names a model that does."""
        return any(mark in template for mark in (self.close, *self.models))

    def left_open_by(self, prompt: str) -> bool:
        """Return whether the prompt ends within reasoning, so that the model continues it."""
        return prompt.rstrip().endswith(self.open)

    def closed_by(self, prompt: str) -> bool:
        """Return whether the prompt ends just after reasoning, so that the model adds none."""
        return prompt.rstrip().endswith(self.close)
