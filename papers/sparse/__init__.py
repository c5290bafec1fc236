"""The figures of "Sparse Prefix Caching for Hybrid and Recurrent LLM Serving"."""
