"""GGUF files for tests: their blocks, their headers, and conversions of Hugging Face checkpoints."""
