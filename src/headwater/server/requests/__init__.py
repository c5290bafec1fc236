"""Requests as clients send them, checked: completions, chats, responses, messages, Ollama's; shared fields."""
