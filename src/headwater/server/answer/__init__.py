"""Answers: formats of reasoning and tool calls, OpenAI's forms, whole replies and streams."""
