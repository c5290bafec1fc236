"""Requests as clients send them, checked: completions, chats, responses, messages, and the fields that they share."""
