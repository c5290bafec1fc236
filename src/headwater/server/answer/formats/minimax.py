"""Calls as JSON, a line each, between <tool_calls> tags: MiniMax-M1 and MiniMax-Text-01.

As M1's chat template has it (vLLM's examples/tool_chat_template_minimax_m1.jinja):

<tool_calls>
{"name": "weather", "arguments": {"city": "Bonn"}}
{"name": "ping", "arguments": {}}
</tool_calls>
"""

from headwater.server.answer.formats.json_calls import JsonCalls

MINIMAX = JsonCalls("<tool_calls>", "</tool_calls>", "\n", "\n", "\n", ("<tool_calls>", '"arguments"'))
