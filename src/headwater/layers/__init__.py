"""Shapes and costs of layers, one class for each kind. No torch.

`mixers` computes what stands here; a checkpoint's family (`models/families`) says which of them follow each other.
"""
