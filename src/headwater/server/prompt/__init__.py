"""Prompts: the chat template, tokens, boundaries found by probing, and segments with their marks."""
