"""Spelling of a policy with options on the command line: `name`, `name(4)`, `name(w=0.85)`."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, TypeVar

from headwater.errors import ConfigError

T = TypeVar("T")


def classes(package: str, names: Mapping[str, str]) -> dict[str, Any]:
    """Import the class that each file of `package` defines: from {file: name of its class} to {file: its class}."""
    return {file: getattr(import_module(f"{package}.{file}"), name) for file, name in names.items()}


def own_class(spelling: str) -> tuple[str, Callable[..., Any]] | None:
    """Return name and class of a policy spelled `FILE.py:CLASS`, with options after it; None for other spellings.

    Raises ConfigError if the file cannot be loaded, or has no such class.
    """
    name = spelling.strip().partition("(")[0].strip()
    file, colon, found = name.rpartition(":")
    if not colon or not file.endswith(".py"):
        return None
    return name, _loaded(str(Path(file).expanduser().resolve()), found)


@cache
def _loaded(file: str, name: str) -> Callable[..., Any]:
    spec = spec_from_file_location(Path(file).stem, file)
    assert spec is not None, "a path that ends in .py has a loader"
    assert spec.loader is not None, "likewise"
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return getattr(module, name)  # type: ignore[no-any-return]
    except Exception as error:  # of the user's own file
        raise ConfigError(f"{file}:{name} cannot be loaded: {type(error).__name__}: {error}") from error


def split(spellings: str) -> tuple[str, ...]:
    """Split a list at its commas outside brackets: `lru, seglen(w=0.5, single_child=False)`."""
    parts, depth = [""], 0
    for letter in spellings:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return tuple(part.strip() for part in parts)


def build(kind: str, spelling: str, table: Mapping[str, Callable[..., T]]) -> T:
    """Build the policy of `table` that `spelling` names. Raises ConfigError for an unknown name or a wrong option."""
    name, bracket, rest = spelling.strip().partition("(")
    if name not in table:
        raise ConfigError(f"{kind} {spelling!r} is unknown; there are {', '.join(sorted(table))}")
    try:
        positional, named = _arguments(bracket + rest or "()")
        bound = inspect.signature(table[name], eval_str=True).bind_partial(*positional, **named)
        _check_missing(bound, name, rest.strip().removesuffix(")").strip(" ,"))
        _check_types(bound)
        return table[name](*bound.args, **bound.kwargs)
    except (SyntaxError, TypeError, ValueError) as error:
        raise ConfigError(f"{kind} {spelling!r} cannot be made: {error}") from error


def _arguments(brackets: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    call = ast.parse(f"policy{brackets}", mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"{brackets!r} are not the arguments of one call")
    positional = tuple(ast.literal_eval(argument) for argument in call.args)
    return positional, {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg is not None}


def _check_missing(bound: inspect.BoundArguments, name: str, typed: str) -> None:
    """Raise TypeError for options without a default that are not given, with what to type. `typed`: the given ones."""
    wanted = [
        one
        for one in bound.signature.parameters.values()
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD and one.name not in bound.arguments
    ]
    if wanted:
        kinds = {one.name: EXPECTED.get(one.annotation, ANYTHING) for one in wanted}
        needs = " and ".join(f"{name}, {expected}" for name, (_, expected, _) in kinds.items())
        whole = ", ".join(filter(None, (typed, *(f"{name}={example}" for name, (_, _, example) in kinds.items()))))
        raise TypeError(f"it needs {needs}; type '{name}({whole})'")


def _check_types(bound: inspect.BoundArguments) -> None:
    """Raise TypeError for an option whose value does not have the annotated type."""
    for name, value in bound.arguments.items():
        parameter = bound.signature.parameters[name]
        several = value.items() if parameter.kind is parameter.VAR_KEYWORD else [(name, value)]
        for option, given in several:
            types, expected, _ = EXPECTED.get(parameter.annotation, ANYTHING)
            if types and (type(given) not in types or (float in types and not math.isfinite(given))):
                raise TypeError(f"{option} is {given!r}, must be {expected}")


Expected = tuple[tuple[type, ...], str, str]  # types of a value, their name in errors, and an example
ANYTHING: Expected = ((), "a value", "...")
EXPECTED: dict[Any, Expected] = {  # by annotation
    int: ((int,), "a whole number", "8"),
    float: ((int, float), "a number", "0.5"),
    bool: ((bool,), "True or False", "True"),
    str: ((str,), "a text in quotes", '"text"'),
}
