"""HYPIC: position-independent caching for hybrid LLMs (2026)."""
