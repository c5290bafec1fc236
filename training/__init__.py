"""Trains the tiny hybrid: tasks, tokenizer, loop and evaluation set."""
