"""The OpenAI-compatible HTTP server, in rooms: routes, requests, prompt, answer, observe, http."""
