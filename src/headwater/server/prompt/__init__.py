"""Prompts from conversations and texts: template, tokens, segments, boundaries."""
