"""Requests as clients send them, checked: completions, chats, responses, and what they share."""
