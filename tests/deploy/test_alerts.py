"""Alert rules for Prometheus select metrics and labels that exist."""

import re

import pytest
import yaml

from headwater.cli.deploy import FOLDER

RULES = FOLDER / "prometheus-alerts.yml"
METRIC = r"(?:headwater|process)_\w+"


@pytest.fixture(scope="module")
def rules():
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return group["rules"]


def test_each_alert_has_a_name_of_its_own_a_severity_and_texts(rules):
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert re.fullmatch(r"\d+[mh]", rule.get("for", "1m"))


def test_each_alert_selects_metrics_and_labels_that_exist(rules, exported):
    for rule in rules:
        names = re.findall(METRIC, rule["expr"])
        assert set(names) <= set(exported), rule["alert"]
        assert names or rule["alert"] == "HeadwaterDown"
        for name, selectors in re.findall(rf"({METRIC})\{{([^}}]*)\}}", rule["expr"]):
            for label, values in re.findall(r'(\w+)=~?"([^"]*)"', selectors):
                assert set(values.split("|")) <= exported[name][label], rule["alert"]
        for opening, closing in ("()", "[]", "{}"):
            assert rule["expr"].count(opening) == rule["expr"].count(closing), rule["alert"]


def test_labels_of_texts_are_those_of_their_metric(rules, exported):
    for rule in rules:
        used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        known = {label for name in re.findall(METRIC, rule["expr"]) for label in exported[name]}
        assert used <= known, rule["alert"]


def test_hit_rate_evictions_tiers_queue_and_proof_have_an_alert(rules):
    text = " ".join(rule["expr"] for rule in rules)
    for name in (
        "headwater_cached_tokens_total",
        "headwater_checkpoints_evicted_unused_total",
        'headwater_tier_work_total{work="corrupt"}',
        "headwater_queue_seconds_bucket",
        "headwater_proven_exact",
    ):
        assert name in text
