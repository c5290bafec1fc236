"""The Compose file agrees with the image, the settings, and the files that it mounts."""

import json
import re

import pytest
import yaml

from headwater.cli import run
from headwater.cli.deploy import FILES, FOLDER
from headwater.cli.settings import NOT_SETTINGS
from headwater.config import SETTINGS, ServeConfig
from headwater.server.http.process import CLOSING_SECONDS
from headwater.setting import parse_bytes
from headwater.tiers.place import TierPlace

IMAGE = (FOLDER / "Dockerfile").read_text()
MOUNTED = {"prometheus-alerts.yml", "grafana-dashboard.json"}


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((FOLDER / "compose.yml").read_text())


@pytest.fixture(scope="module")
def services(compose):
    return compose["services"]


def mounts(service):
    """Return {source: target} of a service's volumes."""
    return dict(volume.split(":")[:2] for volume in service.get("volumes", []))


def contents(compose, service):
    """Return {target: content} of a service's configurations."""
    configs = compose["services"][service]["configs"]
    return {one["target"]: yaml.safe_load(compose["configs"][one["source"]]["content"]) for one in configs}


def test_names_of_volumes_and_configs_are_declared_and_used(compose, services):
    named = {source for one in services.values() for source in mounts(one) if not source.startswith("./")}
    files = {source[2:] for one in services.values() for source in mounts(one) if source.startswith("./")}
    assert named == set(compose["volumes"])
    assert {one["source"] for service in services.values() for one in service.get("configs", [])} == set(
        compose["configs"]
    )
    assert files == MOUNTED == {*FILES["compose"]} - {"compose.yml", "Dockerfile"}


def test_server_has_settings_volume_and_port_of_its_image(services):
    server = services["headwater"]
    command, tier = server["command"][:-1], TierPlace.parse(server["command"][-1])
    assert command == ["serve", "--tier"]
    assert set(server["environment"]) <= {*(one.variable for one in SETTINGS), *NOT_SETTINGS}
    parse_bytes(server["environment"]["HEADWATER_MEMORY"])
    assert f"HEADWATER_CACHE_DIR={mounts(server)['headwater-cache']}" in IMAGE
    assert server["ports"] == [f"127.0.0.1:{ServeConfig().port}:{re.search(r'^EXPOSE (.*)$', IMAGE, re.M)[1]}"]
    assert int(server["stop_grace_period"].removesuffix("s")) > ServeConfig().drain + CLOSING_SECONDS
    assert tier.place.startswith("//redis:6379/")
    redis = services["redis"]["command"]
    assert parse_bytes(redis[redis.index("--maxmemory") + 1].upper()) > tier.size
    assert re.search(r"\[[\w,]*\bredis\b[\w,]*\]", IMAGE)


def test_prometheus_reads_the_server_and_the_alert_rules(compose, services):
    (configured,) = contents(compose, "prometheus").values()
    (scrape,) = configured["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": [f"headwater:{ServeConfig().port}"]}]
    assert scrape.get("metrics_path", "/metrics") == "/metrics"
    folder = "/etc/prometheus/"
    assert [folder + name for name in configured["rule_files"]] == [
        mounts(services["prometheus"])["./prometheus-alerts.yml"]
    ]


def test_grafana_has_prometheus_and_the_dashboard(compose, services):
    datasource, dashboards = contents(compose, "grafana").values()
    (source,), (provider,) = datasource["datasources"], dashboards["providers"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    assert services["prometheus"]["ports"] == ["127.0.0.1:9090:9090"]
    folder = mounts(services["grafana"])["./grafana-dashboard.json"].rpartition("/")[0]
    assert provider["options"]["path"] == folder
    variables = json.loads((FOLDER / "grafana-dashboard.json").read_text())["templating"]["list"]
    assert variables[0]["query"] == source["type"]


def test_published_ports_are_those_of_this_machine_only(services):
    assert all(port.startswith("127.0.0.1:") for one in services.values() for port in one.get("ports", []))


def test_deploy_prints_each_file_and_writes_those_it_names(tmp_path, capsys):
    for kind, names in FILES.items():
        assert run(["deploy", kind]) == 0
        assert capsys.readouterr().out == (FOLDER / names[0]).read_text()
    assert {path.name for path in FOLDER.iterdir()} == {name for names in FILES.values() for name in names}
    assert run(["deploy", "compose", "--out", str(tmp_path / "new")]) == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == set(FILES["compose"])
    capsys.readouterr()
    assert run(["deploy", "docker", "--out", str(tmp_path / "new")]) == 2
    assert "exists, and nothing was written" in capsys.readouterr().err
    assert run(["deploy", "kubernetes"]) == 2
    assert "must be one of systemd, docker, compose, grafana, alerts" in capsys.readouterr().err
