"""The dashboard asks for metrics and labels that there are, and its panels do not lie on each other."""

import itertools
import json
import re

import pytest

from headwater.cli.deploy import FOLDER

FILE = FOLDER / "grafana-dashboard.json"
ADDED = {"job", "instance", "le"}  # by Prometheus, and by histograms


@pytest.fixture(scope="module")
def dashboard():
    return json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def expressions(dashboard):
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_every_metric_that_is_asked_for_exists(expressions, exported):
    asked = set(itertools.chain.from_iterable(re.findall(r"headwater_\w+", expr) for expr in expressions))
    assert len(asked) > 25
    assert asked <= set(exported)


def test_every_label_that_is_selected_or_grouped_by_exists(expressions, exported):
    for expr in expressions:
        labels = set().union(*(exported[name] for name in re.findall(r"headwater_\w+", expr))) | ADDED
        grouped = itertools.chain.from_iterable(
            re.findall(r"\w+", part) for part in re.findall(r"by \(([^)]*)\)", expr)
        )
        assert set(grouped) <= labels, expr
        for name, selectors in re.findall(r"(headwater_\w+)\{([^}]*)\}", expr):
            for label, value in re.findall(r'(\w+)!?=~?"([^"]*)"', selectors):
                assert label in ADDED or value in exported[name][label], expr


def test_every_metric_is_on_the_dashboard_or_listed_as_redundant(expressions, exported):
    shown = set(re.findall(r"headwater_\w+", " ".join(expressions)))
    names = {name for name in exported if name.startswith("headwater_") and not name.endswith(("_created", "_sum"))}
    unseen = {name for name in names - shown if not (name.endswith("_count") and f"{name[:-6]}_bucket" in shown)}
    assert unseen == {
        "headwater_build_info",  # what the variables are filled from
        "headwater_hits_total",
        "headwater_model_info",
        "headwater_proven_exact",  # an alert
        "headwater_resumed_tokens_total",
        "headwater_steps_total",
        "headwater_thread_restarts_total",
        "headwater_waited_for_leader_total",
    }


def test_brackets_close(expressions):
    for expr in expressions:
        for opening, closing in ("()", "[]", "{}"):
            assert expr.count(opening) == expr.count(closing), expr


def test_panels_have_a_place_of_their_own(dashboard):
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = set()
    for panel in panels:
        at = panel["gridPos"]
        own = set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
        assert at["x"] + at["w"] <= 24
        assert not own & cells, panel["title"]
        cells |= own
