"""Calls as a JSON list between <tool_calls> tags: Jamba 1.5 and later.

As vLLM's jamba parser and the outputs in its tests have it, indented; <|bom|> begins a message of Jamba's templates:

<tool_calls>[
    {"name": "weather", "arguments": {"city": "Bonn"}},
    {"name": "ping", "arguments": {}}
]</tool_calls>
"""

from headwater.server.answer.formats.json_calls import JsonCalls

JAMBA = JsonCalls("<tool_calls>", "</tool_calls>", "[\n    ", ",\n    ", "\n]", ("<tool_calls>", "<|bom|>"))
