"""Marconi: Prefix Caching for the Era of Hybrid LLMs (Pan et al., arXiv 2411.19379)."""
