"""Chat templates in the style of real ones, each with one of the habits that make boundaries hard to find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

# strips the reasoning of turns before the last real query, as Qwen3.5's does; thinks unless told not to
REASONING = """
{%- if tools %}<|im_start|>system
{{ messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' }}# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' and not m.content.startswith('<tool_response>') %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role == 'assistant' %}
{%- set answer = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- set thoughts = m.content.split('</think>')[0].strip('\\n') if '</think>' in m.content else '' -%}
<|im_start|>assistant
{% if loop.index0 > ns.last %}<think>
{{ thoughts }}
</think>

{% endif %}{{ answer }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{%- for k, v in call.function.arguments.items() %} {{ k }}={{ v | tojson }}{% endfor %}</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}"""

# the same, but it thinks only when told to
SILENT = (
    REASONING[: REASONING.rindex("{% if enable_thinking")] + "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)

# reads reasoning in a field only, and shows an empty block for that of answers before the last query
FIELD_ONLY = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and '</think>' not in m.content -%}
{%- set thought = '\\n' + m.reasoning_content + '\\n' if m.reasoning_content and loop.index0 > ns.last else '' -%}
<think>{{ thought }}</think>{% endif %}{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""

# the same as the first, with calls in Hermes' format
HERMES = REASONING.replace("<tool_call>{{ call", '<tool_call>"arguments"{{ call')

# states its identity without a system message
DEFAULT_SYSTEM = """
{%- if messages[0].role != 'system' %}<|im_start|>system
You are a careful assistant, made to be useful.<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content | trim }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# shows tools sorted by name, and just before the last user's message
SORTED_TOOLS = """
{%- for m in messages %}
{%- if loop.last and tools %}[TOOLS]
{%- for tool in tools | sort(attribute='function.name') %}{{ tool.function.name }};{% endfor %}[/TOOLS]
{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# roles must alternate, and a tool's result is a user's turn
ALTERNATING = """
{%- for m in messages %}
{%- set role = 'user' if m.role == 'tool' else m.role %}
{%- if role == 'assistant' and loop.last %}{{ raise_exception('the last turn must be the user\\'s') }}{% endif %}
{%- if not loop.first and m.role == 'user' and loop.previtem.role == 'user' %}
{{- raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# channels, as gpt-oss's: reasoning is only shown before a call, of which a message has one, without a content
HARMONY = """
{%- set ns = namespace(name=none) %}<|start|>system<|message|>Reasoning: {{ reasoning_effort or "medium" }}<|end|>
{%- for m in messages %}
{%- if m.role in ('developer', 'system') %}<|start|>developer<|message|>{{ m.content }}<|end|>
{%- elif m.role == 'tool' %}<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>
{{- m.content | tojson }}<|end|>
{%- elif m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception('content or thinking') }}{% endif %}
{%- if m.content or m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>
{%- endif %}
{%- set ns.name = m.tool_calls[0].function.name %}<|start|>assistant to=functions.{{ ns.name }}
{{- '<|channel|>commentary json<|message|>' }}{{ m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- else %}<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>{{ m.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

# gives up on any conversation but the one it is given: of one message, which asks "hello"
BROKEN = """
{%- if messages | length > 1 or messages[0].content != 'hello' %}{{ raise_exception('no such luck') }}{% endif %}
{{- messages[0].content }}"""


# takes one system message, at the start, and needs a user's query; walks arguments as a mapping, as Qwen3.5's does
STRICT = """
{%- if messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content | trim }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if ns.last < 0 %}{{ raise_exception('no query of a user') }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('the system comes first') }}
{%- elif m.role == 'user' %}<|im_start|>user
{{ m.content | trim }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 > ns.last %}<think>
{{ (m.reasoning_content or '') | trim }}
</think>

{% endif %}{{ m.content | trim }}
{%- for call in m.tool_calls or [] %}
{{- '\\n\\n' if loop.first and m.content | trim else ('' if loop.first else '\\n') }}<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments.items() %}<parameter={{ name }}>
{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
</parameter>
{% endfor %}</function>
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}{% endif %}"""

# drops later system messages without a word, switches reasoning by words, and shows no thoughts, as Nemotron v2's does
DROPPING = """
{%- set ns = namespace(think=true) %}
{%- for m in messages %}{% if m.role in ('user', 'system') %}
{%- if '/think' in m.content %}{% set ns.think = true %}
{%- elif '/no_think' in m.content %}{% set ns.think = false %}{% endif %}{% endif %}{% endfor -%}
<S>System
{{ messages[0].content.replace('/no_think', '').replace('/think', '').strip() if messages[0].role == 'system' }}

{% for m in messages %}
{%- if m.role == 'user' %}<S>User
{{ m.content.replace('/no_think', '').replace('/think', '').strip() }}
{% elif m.role == 'tool' %}<S>User
<TOOL_RESPONSE>[{{ m.content }}]</TOOL_RESPONSE>

{% elif m.role == 'assistant' %}<S>Assistant
{{ m.content.strip() }}
{%- if m.tool_calls %}<TOOLCALL>[
{%- for call in m.tool_calls %}{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{{- '' if loop.last else ', ' }}{% endfor %}]</TOOLCALL>{% endif %}
<E>

{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<S>Assistant
{{ '<think>\\n\\n' if ns.think else '<think></think>' }}{% endif %}"""

# joins parts by line ends, and takes system messages anywhere, as Granite 4's does
LINES = """
{%- for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{{ m.content if m.content is string else m.content | map(attribute='text') | join('\\n') }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# marks answers for training, reads thoughts from `thinking`, and takes items() of arguments, as LFM2.5's does
MARKING = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}
{%- if m.thinking is defined %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}(
{%- for name, value in call.function.arguments.items() %}{{ name }}={{ value }};{% endfor %}){% endfor %}
{%- endgeneration %}
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# no system's role; user and assistant alternate but for calls and results; one call a message, as Mistral's and Llama's
TURNS = """
{%- set ns = namespace(user=true) %}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('there is no system') }}{% endif %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != ns.user %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.user = not ns.user %}{% endif %}
{%- if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}
{%- if m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]
{%- elif m.role == 'user' %}[USER]{{ m.content }}[/USER]
{%- else %}{{ m.content }}
{%- for call in m.tool_calls or [] %}[CALL]{{ call.function.name }}
{{- call.function.arguments | tojson }}[/CALL]{% endfor %}
{%- endif %}{% endfor %}"""


# before another template: raises on a later system's message, without a query, and on arguments that are not a mapping
GUARDS = """
{%- set guard = namespace(query=false) -%}
{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first -%}{{ raise_exception('the system comes first') }}{%- endif -%}
{%- if m.role == 'developer' -%}{{ raise_exception('no such role') }}{%- endif -%}
{%- if m.content is not string -%}{{ raise_exception('content is not a text') }}{%- endif -%}
{%- if m.role == 'user' and not m.content.startswith('<tool_response>') -%}{%- set guard.query = true -%}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{%- if call.function.arguments is not mapping -%}{{ raise_exception('arguments are not a mapping') }}{%- endif -%}
{%- endfor -%}
{%- endfor -%}
{%- if not guard.query -%}{{ raise_exception('no query of a user') }}{%- endif -%}
"""


def published() -> list[Any]:
    """Return the published templates as parameters of tests; tests of those that are not there are skipped."""
    folder = Path(__file__).parents[3] / "shared" / "data" / "chat_templates"
    found = sorted(folder.glob("*.jinja"))
    missing = pytest.mark.skip("published chat templates are not beside the checkout")
    return [pytest.param(path.read_text(), id=path.name.split(".chat")[0]) for path in found] or [
        pytest.param("", id="published", marks=missing)
    ]
