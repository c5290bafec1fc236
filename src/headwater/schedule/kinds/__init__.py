"""Kinds of sequences, one a file: each says its next leg, what follows its last one, and who is charged for it."""
