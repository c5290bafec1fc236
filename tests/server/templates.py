"""Chat templates in the style of real ones, each with one of the habits that make boundaries hard to find."""

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

# the same, with calls in Hermes' format
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

# gives up on any conversation but the one it is given: of one message, which asks "hello"
BROKEN = """
{%- if messages | length > 1 or messages[0].content != 'hello' %}{{ raise_exception('no such luck') }}{% endif %}
{{- messages[0].content }}"""
