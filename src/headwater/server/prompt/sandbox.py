"""Sandbox of chat templates, in which the size of a result is bounded before it is computed, and its time is counted.

Templates compute with clients' values: `center(10**9)`, a text doubled in a loop and a list that holds itself twice at
each of forty levels would otherwise take all time or memory in a few steps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from headwater.errors import TemplateError

MAX_STEPS = 1_000_000  # iterations of loops in one rendering: about a second
CHARACTERS_A_STEP = 500  # of results: each step's time and memory are bounded
MAX_CHARACTERS = 32_000_000  # of one rendering, and of one result in a template
MAX_EXPONENT = 1_000
MAX_BITS = 2**14  # of an integer: more cannot be written
MAX_COUNT = 100_000  # of slices and batches, as of the sandbox's ranges
NUMBER = re.compile(r"\d+")
SCALAR_CHARACTERS = 24
BOUNDED = "headwater_bounded"  # name of a filter


@dataclass(slots=True)
class Steps:
    """Steps of one rendering."""

    taken: int = 0

    def take(self, count: int) -> None:
        """Count steps. Raises TemplateError beyond MAX_STEPS."""
        self.taken += count
        if self.taken > MAX_STEPS:
            raise TemplateError(f"the chat template takes more steps for these messages than the {MAX_STEPS:,} allowed")


current_steps: ContextVar[Steps | None] = ContextVar("steps", default=None)


def size_of(value: Any, known: dict[int, int] | None = None) -> int:
    """Return about the characters of a value as text, in the time of its distinct parts."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Namespace):
        return MAX_CHARACTERS + 1  # it may hold anything
    if isinstance(value, int):
        return int(value).bit_length() // 3
    if not isinstance(value, Mapping | KeysView | ValuesView | ItemsView | list | tuple | set):
        return SCALAR_CHARACTERS
    known = {} if known is None else known
    if id(value) not in known:
        known[id(value)] = 2 + sum(2 + size_of(one, known) for one in value)
        if isinstance(value, Mapping):
            known[id(value)] += sum(2 + size_of(one, known) for one in value.values())
    return known[id(value)]


def bounded(characters: int) -> None:
    """Raise TemplateError for a result of more than MAX_CHARACTERS; count the steps of others."""
    if characters > MAX_CHARACTERS:
        raise TemplateError(
            f"the chat template makes {characters:,} characters, at most {MAX_CHARACTERS:,} are accepted"
        )
    steps = current_steps.get()
    if steps is not None and characters >= CHARACTERS_A_STEP:
        steps.take(characters // CHARACTERS_A_STEP)


def bounded_pieces(pieces: Iterable[str]) -> Iterator[str]:
    """Yield pieces of a text. Raises TemplateError as soon as they are too long together."""
    total = 0
    for piece in pieces:
        total += len(piece)
        if total > MAX_CHARACTERS:
            bounded(total)
        yield piece


# -- sizes of the results of operations that can give more than they get; all take the same arguments as the operation


def _padded(value: Any, width: Any = 80, *_: Any, **__: Any) -> int:
    return size_of(value) + int(width)


def _with_tabs(text: str, tabsize: int = 8) -> int:
    return len(text) + text.count("\t") * tabsize


def _replaced(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    places: int = text.count(old) if old else len(text) + 1
    return len(text) + places * size_of(new)


def _joined(separator: Any, parts: Any) -> int:
    return size_of(parts) + len(parts) * size_of(separator)


def _indented(text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    return size_of(text) + (str(text).count("\n") + 1) * (width if isinstance(width, int) else size_of(width))


def _wrapped(text: str, width: int = 79, break_long_words: bool = True, wrapstring: str | None = None, **_: Any) -> int:
    return len(text) + (len(text) // max(1, width) + text.count("\n") + 1) * len(wrapstring or "\n")


def _formatted(text: Any, *args: Any, **named: Any) -> int:
    """Return a bound for `%` and `{}`: widths, and the largest value at each place."""
    values = [one for arg in (*args, named) for one in _values(arg)]
    places = text.count("%") + text.count("{")
    widths = sum(min(int(found), MAX_CHARACTERS + 1) for found in NUMBER.findall(text[: MAX_CHARACTERS + 1]))
    if "*" in text or re.search(r":[^{}:]*\{", text):  # widths among the values
        widths += sum(abs(one) for one in values if isinstance(one, int))
    size: int = len(text) + widths + places * max(map(size_of, values), default=0)
    return size


def _values(arg: Any) -> Iterable[Any]:
    return arg.values() if isinstance(arg, Mapping) else arg if isinstance(arg, tuple | list) else (arg,)


def _translated(text: str, table: Any) -> int:
    return len(text) * max(map(size_of, _values(table)), default=1)


def _counted(value: Any, count: Any = 0, *_: Any, **named: Any) -> int:
    """Return a size beyond the limit for more than MAX_COUNT slices, or digits."""
    count = max((abs(int(one)) for one in (count, *named.values()) if isinstance(one, int)), default=0)
    return MAX_CHARACTERS * count if count > MAX_COUNT else 0


def _summed(value: Any, attribute: Any = None, start: Any = 0) -> int:
    """Return a bound that grows with the square of the number of lists, as the time does."""
    repeats = 1 if isinstance(start, int | float) else max(1, len(value) // MAX_EXPONENT)
    return size_of(value) * repeats


def _printed(value: Any, *_: Any, **__: Any) -> int:
    return size_of(value)


METHODS: Mapping[str, Callable[..., int]] = MappingProxyType({
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes"), _padded),
    **dict.fromkeys(("format", "format_map"), _formatted),
    "expandtabs": _with_tabs, "replace": _replaced, "join": _joined, "translate": _translated,
})  # fmt: skip
FILTERS: Mapping[str, Callable[..., int]] = MappingProxyType({
    **dict.fromkeys(("slice", "batch", "round"), _counted),
    **dict.fromkeys(("string", "pprint", "sort", "unique", "min", "max", "dictsort", "groupby", "tojson"), _printed),
    "center": _padded, "replace": _replaced, "indent": _indented, "wordwrap": _wrapped, "format": _formatted,
    "sum": _summed, "join": lambda value, d="", *_, **__: _joined(d, value),
})  # fmt: skip
LISTED = ("join", "sum", "sort", "unique", "min", "max", "groupby")  # filters that may read an iterator, which ends


class Generator(CodeGenerator):
    """Generator of a template's code, in which `~` is an operation of the sandbox."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for one in node.nodes:
            self.visit(one, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with bounds of every operation, filter, method and output."""

    code_generator_class = Generator
    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=_shown)
        self.filters = {name: _guarded(name, call) for name, call in self.filters.items()}
        self.filters[BOUNDED] = _shown
        self.filters["tojson"] = _guarded("tojson", to_json)
        del self.globals["lipsum"]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            return left ** _exponent(left, right)
        if operator == "%":
            if isinstance(left, str):
                bounded(_formatted(left, right))
            return left % right
        if operator == "+":
            if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                bounded(len(left) + len(right))
            return left + right
        for sized, times in ((left, right), (right, left)):
            if isinstance(sized, str | list | tuple) and isinstance(times, int):
                bounded(len(sized) * times)
        if isinstance(left, int) and isinstance(right, int):
            _fit(left.bit_length() + right.bit_length())
        return left * right

    def call(self, context: Any, called: Any, *args: Any, **named: Any) -> Any:
        method = getattr(called, "__wrapped__", called)
        growth, value = METHODS.get(getattr(method, "__name__", "")), getattr(method, "__self__", None)
        if growth is not None and isinstance(value, str | bytes | int):
            if growth is _joined and args:
                args = (list(args[0]), *args[1:])
            bounded(growth(value, *args, **named))
        return super().call(context, called, *args, **named)

    def joined(self, parts: tuple[Any, ...]) -> str:
        """Return the text of `a ~ b`."""
        bounded(sum(map(size_of, parts)))
        return "".join(map(str, parts))

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Return the text of a block, a macro or a call."""
        text = "".join(bounded_pieces(pieces))
        bounded(len(text))
        return text


def bound_comparisons(tree: jinja2.nodes.Template) -> None:
    """Let the left side of each comparison pass `compared`: shared parts of two lists are compared at each place."""
    for node in tree.find_all(jinja2.nodes.Compare):
        if not isinstance(node.expr, jinja2.nodes.Const):
            node.expr = jinja2.nodes.Filter(node.expr, BOUNDED, [], [], None, None)


def _exponent(left: Any, right: Any) -> Any:
    if isinstance(right, int | float) and abs(right) > MAX_EXPONENT:
        raise TemplateError(f"the chat template raises to the power {right}, at most {MAX_EXPONENT} is accepted")
    if isinstance(left, int) and isinstance(right, int):
        _fit(left.bit_length() * right)
    return right


def _fit(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateError(f"the chat template makes a number of {bits:,} bits, at most {MAX_BITS:,} are accepted")


def _shown(value: Any) -> Any:
    """Return a value that is written, or compared; raises TemplateError if its text would be too long."""
    if not isinstance(value, str):
        bounded(size_of(value))
    return value


def _guarded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter whose result is bounded before it is computed."""
    growth, passes = FILTERS.get(name), hasattr(call, "jinja_pass_arg")

    @wraps(call)
    def guarded(*args: Any, **named: Any) -> Any:
        first, own = args[:passes], args[passes:]
        if name in LISTED and own and not isinstance(own[0], str | Mapping):
            own = (list(own[0]), *own[1:])
        if growth is not None:
            bounded(growth(*own, **named))
        result = call(*first, *own, **named)
        if growth is None and isinstance(result, str):
            bounded(len(result))
        return result

    return guarded


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as plain JSON: jinja2's own filter escapes <, >, & and ', which models were not trained on."""
    options: dict[str, Any] = {"ensure_ascii": ensure_ascii, "separators": separators, "sort_keys": sort_keys}
    if indent is None:
        return json.dumps(value, **options)
    if size_of(separators) + (indent if isinstance(indent, int) else size_of(indent)) > MAX_EXPONENT:
        raise TemplateError(f"the chat template indents by {indent:,}, at most {MAX_EXPONENT:,} is accepted")
    return "".join(bounded_pieces(json.JSONEncoder(indent=indent, **options).iterencode(value)))
