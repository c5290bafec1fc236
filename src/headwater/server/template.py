"""A checkpoint's chat template, run in jinja2's sandbox with what Hugging Face templates expect to find."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headwater.errors import TemplateError


class ChatTemplate:
    """Renders conversations to text. The conventions are those of Hugging Face's chat templates documentation."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens` are names such as bos_token. Raises TemplateError if the source does not compile."""
        self._source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template does not compile: {error}") from error

    def mentions(self, word: str) -> bool:
        return word in self._source

    def render(self, messages: list[dict[str, Any]], now: datetime, variables: Mapping[str, Any]) -> str:
        """The text of the conversation; raises TemplateError, with the template's own words where it refuses."""

        def strftime_now(pattern: str) -> str:
            return now.strftime(pattern)

        values = {**self._special_tokens, **variables, "messages": messages, "strftime_now": strftime_now}
        try:
            return self._template.render(values)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            # a template computes with what clients send, so any of these is theirs to see
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from error


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja2's own filter writes <, >, & and ' as escapes, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
