"""Prefix and segment caching for hybrid LLM serving."""
