"""Gated full attention over paged keys and values."""
