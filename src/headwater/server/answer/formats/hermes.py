"""Calls as JSON between <tool_call> tags, as Hermes writes them.

So do Qwen3 and Qwen3-Next, Granite 4 (the chat template of ibm-granite/granite-4.0-h-*, vLLM's granite4 parser),
Falcon-H1, and Ling and Ring 2.0: whatever their names, it is the chat template that tells.

<tool_call>
{"name": "weather", "arguments": {"city": "Bonn"}}
</tool_call>
"""

from headwater.server.answer.formats.json_calls import JsonCalls

HERMES = JsonCalls("<tool_call>", "</tool_call>", "\n", None, "\n", ("<tool_call>", '"arguments"'))
