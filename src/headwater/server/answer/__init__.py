"""Answers from the engine's events: formats of reasoning and calls, whole replies, streams."""
