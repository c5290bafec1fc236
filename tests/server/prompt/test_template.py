"""A template that does too much is stopped with an error; all others render as in jinja2."""

from datetime import datetime

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headwater.errors import TemplateError
from headwater.server.prompt import template
from headwater.server.prompt.template import ChatTemplate

NOW = datetime(2031, 5, 1)
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MACROS = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}"
CALLS = "{% macro f(n) %}{% if n %}{{ caller() }}{{ caller() }}{% endif %}{% endmacro %}"


def render(source, **variables):
    return ChatTemplate(source).render([{"role": "user", "content": "hi"}], NOW, variables)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (NESTED, r"more steps .* than the 1,000,000"),
        (MACROS, r"more steps .* than the 1,000,000"),
        ("{% for a in tree recursive %}{{ loop(a) }}{{ loop(a) }}{% endfor %}", "does not end|more steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "does not end"),
        ("{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", r"makes 32,00.,000 characters, at most 32,000,000"),
        ("{{ 'xy' * 1000000000 }}", r"makes 2,000,000,000 characters, at most 32,000,000"),
        ("{{ 1000000000 * [1] }}", r"makes 1,000,000,000 characters"),
        ("{{ 9 ** 999999999 }}", r"power 999999999, at most 1000"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_endless_template_is_refused_with_both_numbers(source, words):
    tree = []
    for _ in range(500):
        tree = [tree]
    with pytest.raises(TemplateError, match=words):
        render(source, tree=tree)


def test_rounds_of_loops_and_calls_of_macros_are_counted(monkeypatch):
    monkeypatch.setattr(template, "MAX_STEPS", 33)
    source = "{% macro f() %}.{% endmacro %}{% for a in range(n) %}{{ f() }}{% endfor %}"
    assert render(source, n=3) == "..."
    assert render(source, n=3) == "..."  # each rendering has its own count
    with pytest.raises(TemplateError, match="than the 33 allowed"):
        render(source, n=4)


def test_counting_changes_nothing_that_a_template_can_see():
    source = (
        "{% for a in 'abc' %}{{ loop.index }}{{ a }}{{ '' if loop.last else ',' }}{{ loop.length }}"
        "{{ loop.previtem }}{{ loop.nextitem }}{% else %}none{% endfor %}"
        "{% for a in [] %}x{% else %}none{% endfor %}{% macro m(x, y=2) %}{{ x * y }}{{ caller() }}{% endmacro %}"
        "{% call m(3) %}!{% endcall %}{{ 2 ** 5 }}{{ 'ab' * 2 }}{{ 1.5 * 2 }}"
    )
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source).render()
    assert render(source) == plain


def test_variables_cannot_replace_the_count():
    with pytest.raises(TemplateError, match="more steps"):
        render(NESTED, headwater_steps=None)
