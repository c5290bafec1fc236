"""Models in GGUF files, the format of llama.cpp: configuration, tokenizer and weights in one file."""
