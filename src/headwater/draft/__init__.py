"""Drafters: guesses of a sequence's next tokens, for speculative decoding. They know tokens alone (no torch)."""
