"""<think> … </think>, as Qwen, DeepSeek, Nemotron, Ring, MiniMax-M1, Falcon-H1R and most others write it.

M1's chat template leaves it to the model and has no tag; it names the model in its system prompt.
"""

from headwater.server.answer.formats.reasoning import ReasoningFormat

THINK = ReasoningFormat("<think>", "</think>", ("MiniMax-M1",))
