"""Segments: text that is cached once and reused at any position (HYPIC)."""
