"""Chat template of a checkpoint, run in jinja2's sandbox with the functions that Hugging Face templates expect."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from headwater.errors import TemplateError
from headwater.server.prompt.sandbox import Sandbox, Steps, bound_comparisons, bounded_pieces, current_steps

MACRO_STEPS = 10  # steps that a call of a macro counts as, by the time it takes
STEPS = "headwater_steps"  # name of the counter, and of the filter that counts


class ChatTemplate:
    """Template that renders conversations to text, by the conventions of Hugging Face's chat templates."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens` are names such as bos_token. Raises TemplateError if the source does not compile."""
        self._source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._reads, self._template = _compiled(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"the model's chat template does not compile: {error}") from error

    def mentions(self, word: str) -> bool:
        """Return whether the source holds this text."""
        return word in self._source

    def reads(self, variable: str) -> bool:
        """Return whether the template uses this variable."""
        return variable in self._reads

    def replacing(self, text: str, by: str) -> ChatTemplate:
        """Return a template that writes `by` instead of `text`."""
        if text not in self._source and text not in self._special_tokens.values():
            return self
        special_tokens = {name: by if token == text else token for name, token in self._special_tokens.items()}
        return ChatTemplate(self._source.replace(text, by), special_tokens)

    def render(self, messages: list[dict[str, Any]], now: datetime, variables: Mapping[str, Any]) -> str:
        """Render the conversation.

        Raises TemplateError, with the template's own message if it refuses, and with both numbers if it takes more than
        MAX_STEPS steps or writes more than MAX_CHARACTERS characters.
        """
        values = {**self._special_tokens, **variables, "messages": messages, "strftime_now": now.strftime}
        values[STEPS] = steps = Steps()
        before = current_steps.set(steps)
        try:
            return "".join(bounded_pieces(self._template.generate(values)))
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # a template computes with the client's values, so any of these errors is reported to the client
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise TemplateError(f"the model's chat template does not end: {type(error).__name__}") from error
        finally:
            current_steps.reset(before)


class _Generation(jinja2.ext.Extension):
    """Tag {% generation %}, which marks answers for training: its body is rendered as if it were not there."""

    tags = {"generation"}  # noqa: RUF012  # as the base class has it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=32)
def _compiled(source: str) -> tuple[set[str], jinja2.Template]:
    """Compile the template with a step counted at the start of each body of a loop or macro.

    Returns the variables that it reads, too.
    """
    environment = _environment()
    tree = environment.parse(source)
    variables = jinja2.meta.find_undeclared_variables(tree)
    bodies: tuple[type[Any], ...] = (jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock)
    for node in tree.find_all(bodies):
        # a filter, since calls of functions go through the sandbox and cost ten times as much
        weight = jinja2.nodes.Const(1 if isinstance(node, jinja2.nodes.For) else MACRO_STEPS)
        counter = jinja2.nodes.Name(STEPS, "load")
        step = jinja2.nodes.Filter(counter, STEPS, [weight], [], None, None)
        node.body.insert(0, jinja2.nodes.ExprStmt(step, lineno=node.lineno))
    bound_comparisons(tree)
    tree.set_environment(environment)
    return variables, environment.from_string(tree)


def _environment() -> jinja2.Environment:
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation])
    environment.filters[STEPS] = Steps.take
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def common_prefix(a: str, b: str) -> int:
    """Return the length of the common prefix, by bisection: each comparison is a memcmp of the undecided part."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
