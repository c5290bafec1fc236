"""Calls as a JSON list between <TOOLCALL> tags: Nemotron-H and Nemotron-Nano v2.

As their chat templates have it (the one of NVIDIA-Nemotron-Nano-9B-v2, also in vLLM's and llama.cpp's examples):

<TOOLCALL>[{"name": "weather", "arguments": {"city": "Bonn"}}, {"name": "ping", "arguments": {}}]</TOOLCALL>

Nemotron 3 writes qwen_xml.
"""

from headwater.server.answer.formats.json_calls import JsonCalls

NEMOTRON = JsonCalls("<TOOLCALL>", "</TOOLCALL>", "[", ", ", "]", ("<TOOLCALL>",))
