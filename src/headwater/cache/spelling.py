"""How a policy with options is written on the command line: `name`, `name(4)`, `name(w=0.85)`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from headwater.errors import ConfigError

T = TypeVar("T")


def build(kind: str, spelling: str, table: Mapping[str, Callable[..., T]]) -> T:
    """Make the policy that `spelling` names out of `table`. Raises ConfigError where it names none."""
    name, bracket, rest = spelling.strip().partition("(")
    if name not in table:
        raise ConfigError(f"{kind} {spelling!r} is unknown; there are {', '.join(sorted(table))}")
    try:
        arguments = _arguments(bracket + rest) if bracket else ((), {})
        return table[name](*arguments[0], **arguments[1])
    except (SyntaxError, TypeError, ValueError) as error:
        raise ConfigError(f"{kind} {spelling!r} cannot be made: {error}") from error


def _arguments(brackets: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    call = ast.parse(f"policy{brackets}", mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"{brackets!r} are not the arguments of one call")
    positional = tuple(ast.literal_eval(argument) for argument in call.args)
    return positional, {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg is not None}
