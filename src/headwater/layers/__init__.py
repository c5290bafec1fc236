"""Shapes and costs of layers, one class for each kind, without torch; `mixers` computes them."""
