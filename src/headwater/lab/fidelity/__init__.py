"""Fidelity of prompts composed of segments, layer by layer. It runs a model, and imports torch."""
