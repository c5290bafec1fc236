"""The start of an engine: weights, memory, tiers and device as asked, or an error; what /health says of them."""

import logging
import re
import shutil
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from headwater import kernels, machine
from headwater.cli.serve import load_engine
from headwater.config import ServeConfig
from headwater.draft.drafter import MOST_DRAFTS
from headwater.engine import assembly
from headwater.engine.answering import NoObserver
from headwater.engine.engine import Engine
from headwater.engine.proof.selfcheck import SelfCheck
from headwater.engine.proof.start_checks import check_memory_tiers
from headwater.errors import CheckpointError, ConfigError
from headwater.events import FinishedEvent
from headwater.mixers import numerics
from headwater.mixers.linear import guarded_modes
from headwater.mixers.numerics import Numerics
from headwater.models.files import embedded
from headwater.models.load import LoadedModel, load_model
from headwater.request import Drafting
from headwater.schedule.limits import EXTRA_SLOTS
from headwater.schedule.tuner import ServerTuning
from headwater.setting import SettingError
from headwater.tiers.memory import MemoryStore
from tests.engine.test_engine import collect, generation
from tests.exactness.rig import verify_every_draft, words
from tests.gguf_files.convert import convert
from tests.processors import AVX2, AVX512, pretend
from tests.support import Bench

NOT_EXACT = SelfCheck(False, "attention", "compiled")


def test_health_shows_when_exactness_was_proven(loaded, monkeypatch, caplog):
    config = ServeConfig(model=loaded.path, dtype="float32", memory=64 << 20)
    with caplog.at_level(logging.INFO):
        proven = Engine.load(config).health()["proven"]
    assert f"hits are exact: proven {proven[:16].replace('T', ' ')} UTC for float32" in caplog.text
    assert Engine.load(config).health()["proven"] == proven
    assert Engine.load(replace(config, reproducible=False)).health()["proven"] is None


def test_a_broken_file_is_an_error_before_the_proof(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(assembly, "verdict", lambda *a: pytest.fail("the proof began"))
    folder = shutil.copytree(loaded.path, tmp_path / "folder")
    for path, file in ((folder, folder / "model.safetensors"), (tmp_path / "model.gguf",) * 2):
        if path == file:
            convert(loaded.path, file)
        file.write_bytes(file.read_bytes()[:-1000])
        with pytest.raises(CheckpointError, match=r"truncated|cut off"):
            Engine.load(ServeConfig(model=path, memory=64 << 20))


@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
def test_weights_are_held_as_configured_and_shown_by_health(loaded, weights):
    config = ServeConfig(model=loaded.path, dtype="float32", weights=weights, memory=64 << 20, reproducible=False)
    engine = Engine.load(config)
    assert engine.spec.weights == weights
    assert engine.health()["dtype"] == "float32"
    assert engine.health()["weights"] == ("float32" if weights == "auto" else weights)
    engine.start()
    try:
        *tokens, _ = collect(engine, generation(words(100, 1), logprobs=2))
    finally:
        engine.stop()
    reference = load_model(loaded.path, "float32", weights=weights).model
    bench = Bench(reference)
    logits_V = bench.prefill(bench.sequence(100), list(words(100, 1)))[-1]
    assert tokens[0].logprob == pytest.approx(float(torch.log_softmax(logits_V, -1)[tokens[0].token]), abs=1e-5)


def test_memory_above_the_machines_is_refused_with_setting_and_both_sizes(loaded, monkeypatch, caplog):
    monkeypatch.setattr(machine, "meminfo", {"MemTotal": 16 * 10**9, "MemAvailable": 10**9}.get)
    monkeypatch.setattr(machine, "memory_limit", lambda: None)
    config = ServeConfig(model=loaded.path, dtype="float32", memory=5000 * 10**9)
    with pytest.raises(SettingError, match=r"memory is '5TB', .* 16 GB in all, 1 GB free"):
        Engine.load(config)
    Engine.load(replace(config, memory=2 * 10**9))
    assert "memory is 2 GB, 1 GB are free" in caplog.text
    monkeypatch.setattr(Engine, "over", classmethod(failing(OSError(12, "Cannot allocate memory"))))
    with pytest.raises(SettingError, match=r"memory is '3GB', .* 16 GB in all"):
        Engine.load(replace(config, memory=3 * 10**9))


def test_a_tier_in_memory_is_below_that_of_a_card(loaded, monkeypatch, caplog):
    monkeypatch.setattr(machine, "meminfo", {"MemTotal": 16 * 10**9, "MemAvailable": 16 * 10**9}.get)
    monkeypatch.setattr(machine, "memory_limit", lambda: None)
    monkeypatch.setattr("headwater.engine.proof.start_checks.memory_limit", lambda: None)
    on_cpu = ServeConfig(model=loaded.path, memory=4 * 10**9)
    on_card = replace(on_cpu, memory=80 * 10**9, device="cuda")
    store = MemoryStore(14 * 10**9)
    check_memory_tiers(on_card, [store, MemoryStore(10**9)])
    check_memory_tiers(on_cpu, [])
    assert "a larger --memory" not in caplog.text
    with pytest.raises(SettingError, match=r"the host has 16 GB$"):
        check_memory_tiers(on_card, [store, store])
    with pytest.raises(SettingError, match=r"the host has 16 GB, and memory is 4 GB"):
        check_memory_tiers(on_cpu, [store])
    check_memory_tiers(on_cpu, [MemoryStore(10**9)])
    assert "on a CPU a larger --memory caches as much" in caplog.text
    monkeypatch.setattr("headwater.engine.proof.start_checks.memory_limit", lambda: 8 * 10**9)
    with pytest.raises(SettingError, match=r"the host has 8 GB$"):
        check_memory_tiers(on_card, [store])


def failing(error):
    def fail(*given):
        raise error

    return fail


@pytest.mark.parametrize(("built", "why"), [(None, "is a build without CUDA"), ("12.8", "finds no CUDA device")])
def test_cuda_that_torch_cannot_use_is_an_invalid_setting(loaded, monkeypatch, built, why):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    with pytest.raises(SettingError, match=rf"device is 'cuda', but torch \S+ {why}: use --device cpu"):
        Engine.load(ServeConfig(model=loaded.path, device="cuda"))


@pytest.mark.parametrize(
    ("dtype", "cpu", "compiled", "warned"),
    [
        ("bfloat16", AVX2, True, False),
        ("bfloat16", AVX2, False, True),
        ("float32", AVX2, False, False),
        ("auto", AVX2, True, False),
        ("auto", AVX512, False, False),
    ],
)
def test_torchs_products_without_bfloat16_are_warned_of_and_health_names_the_layout(
    loaded, monkeypatch, caplog, dtype, cpu, compiled, warned
):
    pretend(monkeypatch, cpu)
    monkeypatch.setattr(kernels, "available", lambda: compiled and find_spec("numba") is not None)
    monkeypatch.setattr(assembly, "verdict", lambda *given, **more: SelfCheck(True, None, guarded_modes()[0]))
    layout = "panels of 64 outputs" if kernels.available() else "rows, multiplied in tiles"
    config = ServeConfig(model=loaded.path, dtype=dtype, memory=64 << 20)
    with caplog.at_level(logging.WARNING):
        engine = Engine.load(config)
    assert engine.health()["layout"] == layout
    slow = re.search(r"bfloat16 is slow on this CPU: products take \d+\.\d times as long", caplog.text)
    assert bool(slow) == warned
    assert not any(len(line) > 150 for line in caplog.messages)
    assert ("--dtype float32 (auto's choice)" in caplog.text) == warned
    engine.start()
    *_, end = collect(engine, generation(words(200, 1)))
    engine.stop()
    assert isinstance(end, FinishedEvent)
    numerics.use(Numerics())


@pytest.mark.parametrize(("eviction", "observer"), [("marconi", ServerTuning), ("lru", NoObserver)])
def test_serve_gives_the_tuner_only_to_marconi(
    eviction: str, observer: type, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = SelfCheck(True, None, "compiled")
    monkeypatch.setattr(Engine, "load", lambda config, progress: Engine.over(loaded, check, config))
    config = ServeConfig(memory=32 * loaded.spec.page_bytes, eviction=eviction)
    assert type(load_engine(config).answering.observer) is observer


def test_draft_slots_are_subtracted_from_the_memory(loaded: LoadedModel) -> None:
    check, page = SelfCheck(True, None, "compiled"), loaded.spec.page_bytes
    slots = 2 + EXTRA_SLOTS
    kept = slots * MOST_DRAFTS * loaded.spec.draft_bytes
    engines = [
        Engine.over(loaded, check, ServeConfig(memory=400 * page + kept, max_running=2, speculation=speculation))
        for speculation in ("off", "ngram")
    ]
    assert [engine.draft_bytes for engine in engines] == [0, kept]
    assert engines[1].health()["memory_pages"] == 400
    assert engines[0].health()["memory_pages"] == 400 + kept // page
    with pytest.raises(SettingError, match=f"drafts take {kept:,} bytes and one page {page:,}"):
        Engine.over(loaded, check, ServeConfig(memory=kept, max_running=2, speculation="ngram"))
    with pytest.raises(ConfigError, match="memory is 1,000 bytes, one page of this model is"):  # no word of drafts
        Engine.over(loaded, check, ServeConfig(memory=1000))


def test_engine_without_proven_bits_drafts_nothing_and_health_shows_the_reason(loaded: LoadedModel, caplog) -> None:
    """A request predicts what the one before has said, so there would be drafts."""
    config, answer = ServeConfig(memory=400 * loaded.spec.page_bytes, speculation="ngram"), list[int]()
    for check, shown in ((NOT_EXACT, "off, not exact: attention"), (SelfCheck(True, None, "compiled"), "ngram")):
        engine = Engine.over(loaded, check, config)
        assert engine.health()["speculation"] == shown
        verify_every_draft(engine.scheduler.speculation)
        engine.start()
        for _ in range(2):
            asked = generation(words(100, 1), max_tokens=30)
            *tokens, _ = collect(engine, replace(asked, drafting=Drafting(prediction=tuple(answer))))
            answer = [event.token for event in tokens]
        engine.stop()
        stats = engine.stats()
        assert (stats.accepted_drafts > 0) == (engine.draft_bytes > 0) == check.deterministic
    assert caplog.messages == ["speculation is off, since drafts may change bits of answers here: attention"]


def test_engine_without_proven_bits_loads_neither_head_nor_draft_model(monkeypatch) -> None:
    loads, load = [], assembly.load_model
    monkeypatch.setattr(assembly, "load_model", lambda *given: loads.append(given) or load(*given))
    monkeypatch.setattr(assembly, "verdict", lambda *given: NOT_EXACT)
    before = numerics.current()
    try:
        for settings in ({"speculation": "mtp"}, {"speculation": "draft", "draft_model": embedded()}):
            engine = Engine.load(ServeConfig(model=embedded(), dtype="float32", memory=64 << 20, **settings))
            assert engine.health()["speculation"] == "off, not exact: attention"
            assert engine.scheduler.speculation.head is engine.loaded.mtp is None
    finally:
        numerics.use(before)
    assert len(loads) == 2


@pytest.mark.parametrize(("megabytes", "rows"), [(1, 16), (8, 8), (20, 4), (100, 2), (300, 1)])
def test_staged_checkpoints_are_many_if_small_and_one_if_large(
    megabytes: int, rows: int, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of the embedded model's size stands for one of so many MiB: the limits shrink with it."""
    row = loaded.spec.checkpoint_pages * loaded.spec.page_bytes
    for name in ("STAGED_BYTES", "MIN_SAVES_BYTES"):
        monkeypatch.setattr(assembly, name, getattr(assembly, name) * row // (megabytes * 2**20))
    engine = Engine.over(loaded, SelfCheck(True, None, "compiled"), ServeConfig(memory=50 * row))
    assert engine.scheduler.limits.saves_per_step == rows
