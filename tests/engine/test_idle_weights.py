"""Weights that leave memory while an engine is idle: what stays, what comes back, and a checkpoint that has changed."""

import gc
import shutil
import threading
import time
import weakref
from contextlib import contextmanager

import pytest
import torch

from headwater.config import ServeConfig
from headwater.engine import idle_weights
from headwater.engine.engine import Engine
from headwater.errors import ModelUnavailable
from headwater.setting import SettingError
from tests.exactness.rig import PATIENCE, Rig, words

PROMPT = words(300, "idle")


class Unloading(Rig):
    """A rig over an engine that was loaded from a checkpoint."""

    def __init__(self, path, **settings):
        config = ServeConfig(model=path, dtype="float32", memory=64 << 20, unload_after=0.1, **settings)
        self.engine = Engine.load(config)
        self.engine.verification.logits_tap = self._keep
        self._answers, self._lock = {}, threading.Lock()

    def wait_until_unloaded(self):
        end = time.monotonic() + PATIENCE
        while self.engine.health()["loaded"]:
            assert time.monotonic() < end, "the weights stay"
            time.sleep(0.02)


@pytest.fixture
def folder(loaded, tmp_path):
    return shutil.copytree(loaded.path, tmp_path / "folder")


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_hits_after_a_reload_have_the_same_bits(folder, weights):
    with Unloading(folder, weights=weights) as rig:
        cold = rig.ask(PROMPT)
        rig.settle()
        hit = rig.ask(PROMPT)
        model = weakref.ref(rig.engine.runner.model)
        rig.wait_until_unloaded()
        gc.collect()
        assert model() is None
        again = rig.ask(PROMPT)
        other = rig.ask(words(200, "other"))
    assert hit.account.cached_tokens == again.account.cached_tokens > 256
    assert again.same_bits(cold)
    assert again.same_bits(hit)
    assert not torch.equal(other.logits[0], again.logits[0])


@contextmanager
def changed(file):
    """Change a weight for a while."""
    content = file.read_bytes()
    file.write_bytes(content[:-64] + bytes(64))
    yield
    file.write_bytes(content)


@pytest.mark.parametrize(("sees_files", "why"), [(True, "files have changed"), (False, "other bits")])
def test_changed_checkpoint_is_refused_and_the_first_one_serves_again(folder, monkeypatch, sees_files, why):
    if not sees_files:
        monkeypatch.setattr(idle_weights, "weights_digest", lambda path: "the same")
    with Unloading(folder) as rig:
        cold = rig.ask(PROMPT)
        rig.wait_until_unloaded()
        with changed(folder / "model.safetensors"), pytest.raises(ModelUnavailable, match=why):
            rig.ask(PROMPT)
        assert not rig.engine.health()["loaded"]
        assert rig.ask(PROMPT).same_bits(cold)


@pytest.mark.parametrize(("name", "value"), [("speculation", "auto"), ("device", "cuda")])
def test_settings_that_refer_to_the_weights_are_refused(name, value):
    with pytest.raises(SettingError, match=rf"unload_after is 5, but {name} is '{value}': it needs"):
        ServeConfig(unload_after=5, **{name: value})
