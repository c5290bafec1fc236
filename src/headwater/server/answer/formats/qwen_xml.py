"""Calls in tags, one a parameter, as Qwen3-Coder, Qwen3.5 and Nemotron 3 write them.

<tool_call>
<function=name>
<parameter=key>
value
</parameter>
</function>
</tool_call>
"""

from headwater.server.answer.formats.xml_calls import XmlCalls

QWEN_XML = XmlCalls(
    open="<tool_call>",
    close="</tool_call>",
    function=("<function=", ">"),
    function_end="</function>",
    parameter=("<parameter=", ">"),
    parameter_end="</parameter>",
    line="\n",
    several=False,
)
