"""Requests as clients send them, checked: completions, chats, responses, and the fields that they share."""
