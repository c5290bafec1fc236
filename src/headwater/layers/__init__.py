"""What a model is made of, as shapes and costs: one class a kind of layer. No torch.

`mixers` computes what stands here; a checkpoint's family (`models/families`) says which of them follow each other.
"""
