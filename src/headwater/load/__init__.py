"""Load on any OpenAI-compatible server: recorded or drawn traffic, sent and measured; and a chat with it."""
