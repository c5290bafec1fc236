"""Calls in tags, one a parameter, as MiniMax-M2 writes them.

As M2's chat template has it (llama.cpp's models/templates has one of Unsloth):

<minimax:tool_call>
<invoke name="name">
<parameter name="key">value</parameter>
</invoke>
</minimax:tool_call>
"""

from headwater.server.answer.formats.xml_calls import XmlCalls

MINIMAX_XML = XmlCalls(
    open="<minimax:tool_call>",
    close="</minimax:tool_call>",
    function=('<invoke name="', '">'),
    function_end="</invoke>",
    parameter=('<parameter name="', '">'),
    parameter_end="</parameter>",
    line="",
    several=True,
)
