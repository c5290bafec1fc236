"""A template that does too much is stopped with an error; all others render as in jinja2."""

import time
from datetime import datetime

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headwater.errors import TemplateError
from headwater.server.prompt import sandbox
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


def doubling(operation, times=999, first="'xy'"):
    """Return a template that doubles a value, `a`, again and again."""
    return (
        f"{{% set n = namespace(a={first}) %}}{{% for _ in range({times}) %}}"
        f"{{% set a = n.a %}}{{% set n.a = {operation} %}}{{% endfor %}}"
    )


TREE = doubling("[a, a]", 60)  # a list of 2^60 texts
HOSTILE = {
    "center": "{{ 'x'.center(n) }}", "center filter": "{{ 'x'|center(n) }}", "ljust": "{{ 'x'.ljust(n)|length }}",
    "zfill": "{{ '1'.zfill(n) }}", "to_bytes": "{{ (1).to_bytes(n) }}", "attr": "{{ ('x'|attr('center'))(n) }}",
    "map": "{{ ['x']|map('center', n)|list }}", "expandtabs": "{{ '\t'.expandtabs(n) }}",
    "replace": "{{ ('x' * 9999).replace('x', 'y' * 9999) }}",
    "replace filter": "{{ 'xxxxxxxxx'|replace('', 'y' * 9**7) }}",
    "join": "{{ ('y' * 9**7).join('x' * 99) }}", "join filter": "{{ range(9999)|join('y' * 9999) }}",
    "indent": "{{ 'a\nb'|indent(n) }}", "wordwrap": "{{ ('a ' * 9999)|wordwrap(1, wrapstring='y' * 9999) }}",
    "format": "{{ '%1000000000d'|format(1) }}", "%": "{{ '%1000000000d' % 1 }}", "%*": "{{ '%*d' % (n, 1) }}",
    "named": "{{ ('%(a)s' * 99) % {'a': 'x' * 9**7} }}", "{}": "{{ '{:1000000000}'.format(1) }}",
    "{:{}}": "{{ '{:{}}'.format(1, n) }}", "{0}": "{{ ('{0}' * 99).format('x' * 9**7) }}",
    "translate": "{{ ('x' * 9999).translate({120: 'y' * 9999}) }}", "tojson": "{{ [1]|tojson(indent=10**8) }}",
    "slice": "{{ [1]|slice(2 * 10**8)|list }}", "batch": "{{ [1]|batch(10**8, 0)|list }}",
    "round": "{{ 1.5|round(n, 'ceil') }}", "**": "{{ ((9**1000)**1000)**1000 }}", "lipsum": "{{ lipsum(n) }}",
    "*": doubling("a * a", first="9"), "~": doubling("a ~ a"), "+": doubling("a + a"),
    "list +": doubling("a + a", first="[1]"),
    "block": "{% macro f(a) %}{{ a }}{{ a }}{% endmacro %}" + doubling("f(a)"),
    "set block": doubling("a").replace("{% set n.a = a %}", "{% set n.a %}{{ a }}{{ a }}{% endset %}"),
    "shared": TREE + "{{ n.a }}", "shared ~": TREE + "{{ n.a ~ '' }}", "shared string": TREE + "{{ n.a|string }}",
    "shared tojson": TREE + "{{ n.a|tojson }}", "shared sort": TREE + "{{ [n.a, n.a]|sort }}",
    "namespace": TREE + "{{ n }}",
    "shared indent": TREE + "{{ n.a|tojson(indent=1) }}", "shared join": TREE + "{{ n.a|join }}",
    "shared ==": TREE.replace("n.", "m.").replace("n =", "m =") + TREE + "{{ n.a == m.a }}",
    "sum": "{{ ([[1]] * 99999)|sum(start=[]) }}",
    "texts held": doubling("a + ['x' * 9**7]", first="[]"),
}  # fmt: skip


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_result_of_every_operation_is_bounded_before_it_is_computed(source, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_CHARACTERS", 10**6)
    monkeypatch.setattr(sandbox, "MAX_STEPS", 10**5)
    begun = time.thread_time()
    with pytest.raises(TemplateError):
        render(source.replace("(n)", "(10**9)").replace("n)", "10**9)", source.startswith("{{")))
    assert time.thread_time() - begun < 2.0


def test_results_within_the_bounds_are_those_of_jinja():
    source = (
        "{{ 'x'.center(9) }}{{ 'x'|center(5) }}{{ 'a\nb'|indent(2, true) }}"
        "{{ 'a b'|wordwrap(1) }}{{ '%5d|%s'|format(3, 'a') }}"
        "{{ '%(a)s' % {'a': 4} }}{{ '{:>4}{b}'.format(1, b='c') }}"
        "{{ 'aXb'.replace('X', 'YY') }}{{ 'ab'|replace('a', 'cc', 1) }}"
        "{{ ['a', 1]|join(', ') }}{{ ', '.join(['a', 'b']) }}{{ [3, 1, 2]|sort|join }}"
        "{{ [{'a': 1}]|sum(attribute='a') }}"
        "{{ [[1], [2]]|sum(start=[]) }}{{ 'a' ~ 1 ~ none }}{{ 7 % 4 }}{{ 'a' + 'b' }}"
        "{{ [1] + [2] }}{{ 3.14159|round(2) }}"
        "{{ [1, 2, 3]|slice(2)|list }}{{ [1, 2, 3]|batch(2, 0)|list }}"
        "{{ {'b': 1}|dictsort }}{{ 'abc'|map('upper')|join('-') }}"
        "{{ [1, 2] == [1, 2] }}{{ 'a' in ['a'] }}{{ 1 < 2 <= 2 }}{{ '7'.zfill(3) }}{{ {'a': [1]}.items()|list }}"
        "{{ 'x,y'.split(',')|map('center', 3)|list }}{{ undefined_name }}{{ 12|string }}"
        "{{ [1, 1]|unique|list }}{{ 'a'|max }}"
        "{% set b %}{{ 1 }}{{ 2 }}{% endset %}{{ b }}{% filter upper %}a{{ b }}{% endfilter %}"
    )
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert render(source) == plain.from_string(source).render()


def test_rounds_of_loops_and_calls_of_macros_are_counted(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_STEPS", 33)
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
