"""The tables of "Rethinking Prefix Caching for Hybrid LLMs" (SegLen)."""
