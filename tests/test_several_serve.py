"""`headwater serve A B` as a process: two models, whose weights leave memory while they are idle."""

import re
import time

import httpx
import pytest

from headwater.config import ServeConfig
from headwater.setting import SettingError
from tests.checkpoints import write
from tests.checkpoints.qwen import DENSE
from tests.forked import PATIENCE, Forked, address, headwater, listening

PROMPT = "the quiet river flows under the old stone bridge and " * 30
ASKED = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, checkpoint):
    """A model with 100 MB of weights, and a small one."""
    wide = tmp_path_factory.mktemp("models") / "wide"
    write(wide, DENSE.recipe(hidden_size=256, intermediate_size=16_384))
    return wide, checkpoint("qwen3_5")


def resident_bytes(process):
    with open(f"/proc/{process.pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


def until(found):
    end = time.monotonic() + PATIENCE
    while not found():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_two_models_are_served_and_come_back_with_their_caches(folders):
    flags = ("--memory", "100MB", "--port", "0", "--dtype", "float32", "--unload-after", "1")
    with listening(Forked("serve", *map(str, folders), *flags)) as (process, said):
        base = address(said)
        client = httpx.Client(base_url=base.removesuffix("/v1"), timeout=PATIENCE)

        def ask(model):
            answer = client.post("/v1/completions", json={"model": model, **ASKED}).json()
            known = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return known, answer["choices"][0]["logprobs"]["token_logprobs"]

        def states():
            return {one["id"]: one["state"] for one in client.get("/v1/models").json()["data"]}

        colds = {model: ask(model) for model in ("wide", "qwen3_5")}
        assert [known for known, _ in colds.values()] == [0, 0]
        assert colds["wide"][1] != colds["qwen3_5"][1]
        held, cached = resident_bytes(process), cache_bytes(client)
        assert min(cached.values()) > 0
        until(lambda: set(states().values()) == {"unloaded"})
        until(lambda: held - resident_bytes(process) > 80 * 10**6)
        assert cache_bytes(client).keys() == cached.keys()
        assert min(cache_bytes(client).values()) > 0
        assert ask("wide")[1] == colds["wide"][1]
        assert states() == {"wide": "loaded", "qwen3_5": "unloaded"}
        for model, (_, cold) in colds.items():
            known, hit = ask(model)
            assert (known > 256, hit) == (True, cold)
        assert client.post("/v1/completions", json={"model": "third", **ASKED}).status_code == 404
        process.terminate()
        _, log = process.communicate()
    assert process.returncode == 0, log
    assert re.search(r"wide: weights are unloaded after 1 s .*\n(.*\n)*.*wide: weights are loaded again", log), log
    assert "Traceback" not in log


def cache_bytes(client):
    return {one["name"]: one["cache_bytes"] for one in client.get("/api/ps").json()["models"]}


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("model_name", "x", "model_name is 'x', but 2 models are served"),
        ("kv_events", True, "kv_events is on, but 2 models are served"),
        ("tier", ("memory,size=1GB",), "tier is 'memory,size=1GB', but 2 models are served"),
    ],
)
def test_settings_of_one_model_are_refused_for_several(name, value, why):
    with pytest.raises(SettingError, match=why):
        ServeConfig(more_models=("b",), **{name: value})


def test_two_models_of_one_name_are_refused(folders):
    ended = headwater("serve", str(folders[1]), str(folders[1]), "--port", "0")
    assert ended.returncode == 2
    assert "two models have the name 'qwen3_5'" in ended.stderr
