"""<think> … </think>, as Qwen, DeepSeek, Nemotron and most others write it."""

from headwater.server.formats.reasoning import ReasoningFormat

THINK = ReasoningFormat("<think>", "</think>")
