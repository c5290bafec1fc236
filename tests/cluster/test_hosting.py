"""Settings that a cluster sends to its workers, which may be on other hosts."""

import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from headwater.cluster.encryption import RouterKeys
from headwater.cluster.hosting import Host, refuse_inexact, worker_config
from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.engine.proof.selfcheck import SelfCheck
from headwater.errors import ConfigError

KEY = "a key of clients"


@pytest.mark.parametrize("in_a_file", [False, True])
def test_workers_get_no_secrets_or_files_of_the_http_server(in_a_file: bool, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    files = [tmp_path / name for name in ("key", "tls_cert", "tls_key")]
    for file in files:
        file.write_text(KEY)
    key = {"api_key_file": files[0]} if in_a_file else {"api_key": KEY}
    whole = ServeConfig(memory=4 * 10**9, tls_cert=files[1], tls_key=files[2], record=folder / "traffic", **key)
    sent = pickle.dumps(worker_config(whole, workers=4, threads=2))
    assert KEY.encode() not in sent
    for file in files:
        file.unlink()
    folder.rmdir()
    there = replace(pickle.loads(sent), kv_events=True)
    assert (there.memory, there.threads, there.kv_events) == (10**9, 2, True)


def test_worker_whose_self_check_fails_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    no, config = "rows of one product", ServeConfig()
    loaded = SimpleNamespace(check=SelfCheck(False, no, "plain"))
    monkeypatch.setattr(Engine, "load", lambda config, share_weights: loaded)
    monkeypatch.setattr("headwater.cluster.hosting.configure_logging", lambda *of: None)
    with pytest.raises(ConfigError, match="the self-check of a worker's kernels says no: rows of one product"):
        Host(config, RouterKeys.new().for_workers, lambda: "127.0.0.1", share_weights=False)
    refuse_inexact(no, replace(config, reproducible=False))
    refuse_inexact(None, config)
