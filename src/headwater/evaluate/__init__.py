"""Quality of a server's answers, and fidelity of prompts composed of segments.

Only the files `fidelity_*` run a model, and import torch.
"""
