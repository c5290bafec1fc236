"""Chat templates' parts that print calls, in the style of each format's real ones."""

from __future__ import annotations

from datetime import datetime
from functools import cache
from pathlib import Path

from headwater.server.answer.formats import TOOLS
from headwater.server.prompt.template import ChatTemplate

XML_VALUE = "{{ v if v is string else (v | tojson if v is mapping or v is sequence else v | string) }}"
JSON_CALL = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
EACH = "{% for call in messages[-1].tool_calls %}"
PARAMETERS = "{% for k, v in call.function.arguments.items() %}"


def _listed(before, between, after):
    return f"{before}{EACH}{JSON_CALL}{{{{ '' if loop.last else '{between}' }}}}{{% endfor %}}{after}"


CALLS = {
    "qwen_xml": (
        EACH + "{{ '' if loop.first else '\\n' }}<tool_call>\n<function={{ call.function.name }}>\n" + PARAMETERS
        + "<parameter={{ k }}>\n" + XML_VALUE + "{{ '\\n' }}</parameter>\n{{ '' }}{% endfor %}</function>\n</tool_call>"
        + "{% endfor %}"
    ),
    "hermes": EACH + "{{ '' if loop.first else '\\n' }}<tool_call>\n" + JSON_CALL + "\n</tool_call>{% endfor %}",
    "nemotron": _listed("<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "kimi": (
        "<|tool_calls_section_begin|>" + EACH + "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
        "{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"
    ),
    "jamba": _listed("<tool_calls>[\n{{ '    ' }}", ",\\n    ", "{{ '\\n' }}]</tool_calls>"),
    "minimax": _listed("<tool_calls>\n", "\\n", "{{ '\\n' }}</tool_calls>"),
    "minimax_xml": (
        "<minimax:tool_call>\n{{ '' }}" + EACH + '<invoke name="{{ call.function.name }}">\n{{ \'\' }}' + PARAMETERS
        + '<parameter name="{{ k }}">' + XML_VALUE + "</parameter>\n{{ '' }}{% endfor %}</invoke>\n{{ '' }}{% endfor %}"
        + "</minimax:tool_call>"
    ),
    "granite": _listed("<|tool_call|>[", ", ", "]"),
    "python": (
        "<|tool_call_start|>[" + EACH + "{{ '' if loop.first else ', ' }}{{ call.function.name }}(" + PARAMETERS
        + "{{ '' if loop.first else ', ' }}{{ k }}="
        + "{{ v | tojson if v is string or v is mapping or v is sequence else v }}"
        + "{% endfor %}){% endfor %}]<|tool_call_end|>"
    ),
}  # fmt: skip
assert set(CALLS) == set(TOOLS)

REAL = Path("../shared/data/chat_templates")
REAL_TEMPLATES = {  # with the text after an answer
    "qwen_xml": ("qwen3.5-0.8b.chat_template.jinja", "<|im_end|>\n"),
    "hermes": ("granite-4.0-h.chat_template.jinja", "<|end_of_text|>\n"),
    "nemotron": ("nvidia-nemotron-nano-v2.chat_template.jinja", "\n<SPECIAL_12>\n\n"),
}


@cache
def template(source):
    return ChatTemplate(source)


def printed(name, message):
    """Return a message's calls as the template of our own prints them."""
    return template(CALLS[name]).render([message], datetime(2026, 1, 1), {})


def printed_by_real(name, message):
    """Return the end of a conversation with this message as a real template prints it."""
    source, after = (REAL / REAL_TEMPLATES[name][0]).read_text(), REAL_TEMPLATES[name][1]
    messages = [{"role": "user", "content": "hello"}, message, {"role": "tool", "content": "done"}]
    both = [template(source).render(messages[:n], datetime(2026, 1, 1), {}) for n in (2, 3)]
    shared = next((i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
    return both[0][:shared].removesuffix(after) if both[0][:shared].endswith(after) else both[0].removesuffix(after)
