"""Calls as a JSON list after the token <|tool_call|>: Granite 3. Nothing closes it but the list's end.

As vLLM's granite parser reads it. Granite 4 writes hermes.

<|tool_call|>[{"name": "weather", "arguments": {"city": "Bonn"}}, {"name": "ping", "arguments": {}}]
"""

from headwater.server.answer.formats.json_calls import JsonCalls

GRANITE = JsonCalls("<|tool_call|>", "", "[", ", ", "]", ("<|tool_call|>",))
