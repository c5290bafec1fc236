"""Fingerprints of stored states: each single component changes them, and a store names the components that differ."""

import platform
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headwater import machine
from headwater.engine.proof import verdict as verdicts
from headwater.engine.proof.fingerprint import Probe, fingerprint, probe
from headwater.engine.tiers.tier import MAX_OTHER_FINGERPRINTS, TierFingerprints
from headwater.models.load import LoadedModel, load_model
from headwater.tiers.fingerprint import Fingerprint
from headwater.tiers.memory import MemoryStore
from headwater.tiers.names import Names, fingerprint_name, state_name
from headwater.tiers.part import CorruptPart, Sealer
from tests.processors import AVX2, AVX512, pretend

KEY = bytes(range(32))
ADDITION = "spread(projected, b + value_heads) + spread(gates, value_heads + head)"  # in the kernel of Gated DeltaNet
SWAPPED = "spread(gates, value_heads + head) + spread(projected, b + value_heads)"
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> tuple[LoadedModel, Path]:
    path = checkpoint("qwen3_5")
    return load_model(path, "float32"), path


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("HEADWATER_CACHE_DIR", str(tmp_path / "cache"))


def of(model: tuple[LoadedModel, Path], mode: str = "compiled", probed: str = "bits", **spec: Any) -> Fingerprint:
    loaded, path = model
    return fingerprint(replace(loaded, spec=replace(loaded.spec, **spec)), path, mode, Probe(probed, 0.1))


def another_weight(path: Path) -> None:
    """Change a bit of the last weight."""
    (file,) = path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def versions(patch: Patch, package: str) -> None:
    known = machine.versions
    other = {package: "9.9"}
    patch.setattr(machine, "versions", lambda *names: {n: other.get(n, found) for n, found in known(*names).items()})


def other_threads(patch: Patch) -> None:
    patch.setattr(torch, "get_num_threads", lambda: 7)


# by component, a change of what it is taken from
SURROUNDINGS: dict[str, Callable[[Patch], Any]] = {
    "processor": lambda patch: pretend(patch, AVX512 if machine.cpu() == AVX2 else AVX2),
    "cores": lambda patch: patch.setattr(machine, "affinity", lambda: (7,)),
    "device": lambda patch: patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "OTHER"),
    "torch": lambda patch: patch.setattr(torch, "__version__", "9.9"),
    "libc": lambda patch: patch.setattr(platform, "libc_ver", lambda: ("glibc", "9.9")),
    "headwater": lambda patch: versions(patch, "headwater"),
    "llvmlite": lambda patch: versions(patch, "llvmlite"),
    "numba": lambda patch: versions(patch, "numba"),
    "triton": lambda patch: versions(patch, "triton"),
    "code": lambda patch: patch.setattr(verdicts, "_code", lambda: ["other"]),
    "products": lambda patch: patch.setattr(verdicts, "guarded_modes", lambda device: ("other",)),
    "building": lambda patch: patch.setattr("headwater.engine.proof.fingerprint.BUILDING", ("engine/runner.py",)),
    "variables": lambda patch: patch.setenv("MKL_CBWR", "COMPATIBLE"),
    "threads": other_threads,
}
GIVEN: dict[str, dict[str, Any]] = {
    "dtype": {"dtype_name": "bfloat16"},
    "weights": {"weights": "int8"},
    "shapes": {"vocab_size": 999},
    "mode": {"mode": "tiled"},
    "page": {"page_size": 128},
    "layout": {"max_length": 999},
    "probe": {"probed": "other bits"},
}


@pytest.mark.parametrize("component", SURROUNDINGS)
def test_surroundings_are_components(model, component: str, monkeypatch: Patch) -> None:
    own = of(model)
    with monkeypatch.context() as patch:
        SURROUNDINGS[component](patch)
        other = of(model)
    assert component in own.differs(other)
    assert own.digest != other.digest
    assert of(model) == own


@pytest.mark.parametrize("component", GIVEN)
def test_computation_and_its_settings_are_components(model, component: str) -> None:
    own, other = of(model), of(model, **GIVEN[component])
    assert component in own.differs(other)
    assert own.digest != other.digest


def test_a_bit_of_the_weights_is_a_component(model, tmp_path: Path) -> None:
    loaded, path = model
    copy = shutil.copytree(path, tmp_path / "copy")
    own = of((loaded, copy))
    assert own == of(model), "the same files elsewhere"
    another_weight(copy)
    assert own.differs(of((loaded, copy))) == ["files"]


def test_a_kernel_with_one_swapped_addition_is_another_fingerprint(model, tmp_path: Path, monkeypatch: Patch) -> None:
    for name in verdicts.CODE:
        source, target = verdicts.PACKAGE / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    own = of(model)
    monkeypatch.setattr(verdicts, "PACKAGE", tmp_path)
    assert of(model) == own
    kernel = tmp_path / "kernels" / "gdn.py"
    text = kernel.read_text()
    assert text.count(ADDITION) == 1
    kernel.write_text(text.replace(ADDITION, SWAPPED))
    assert own.differs(of(model)) == ["code"]


def test_every_component_has_a_change(model) -> None:
    assert set(of(model).components) <= {*SURROUNDINGS, *GIVEN, "files"}


def test_each_single_component_changes_every_name(model) -> None:
    own = of(model)
    digests = Names(KEY, own.digest, 4).digests("", bytes(40))
    for name in own.components:
        other = Fingerprint({**own.components, name: "other"})
        names = Names(KEY, other.digest, 4)
        assert not {*digests} & {*names.digests("", bytes(40))}, name
        assert own.differs(other) == [name]


CARD = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
# by name, a change of a card or of what computes on it
CARDS: dict[str, Callable[[Patch], Any]] = {
    "name": lambda patch: card(patch, name="NVIDIA H100 80GB HBM3"),
    "capability": lambda patch: card(patch, minor=1),
    "multiprocessors": lambda patch: card(patch, multi_processor_count=114),
    "cuda": lambda patch: patch.setattr(torch.version, "cuda", "99.9"),
    "cublas": lambda patch: versions(patch, "nvidia-cublas"),
    "driver": lambda patch: patch.setattr(verdicts, "DRIVER", Path(__file__)),
}


def card(patch: Patch, **more: Any) -> None:
    patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**{**vars(CARD), **more}))


@pytest.mark.parametrize("change", CARDS)
def test_card_and_its_libraries_are_a_component(model, change: str, monkeypatch: Patch) -> None:
    loaded, path = model
    on_card = replace(loaded, device="cuda"), path
    card(monkeypatch)
    own = of(on_card)
    assert own.differs(of(model)) == ["device", "products"]
    assert of(on_card) == own
    with monkeypatch.context() as patch:
        CARDS[change](patch)
        assert own.differs(of(on_card)) == ["device"]


def test_the_kernels_of_cards_are_in_the_code_of_the_component() -> None:
    files = [text.partition("\n")[0] for text in verdicts._code()]
    assert {"mixers/gpu/attention.py", "mixers/gpu/gdn.py", "mixers/gpu/ragged.py"} <= {*files}


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here: it comes with the test extra")
@pytest.mark.usefixtures("wide_blocks")
def test_the_probe_computes_where_the_model_does(model, gpu_path, monkeypatch: Patch) -> None:
    """With the kernels of cards, in Triton's interpreter, the bits are others."""
    monkeypatch.setattr("headwater.engine.proof.fingerprint.PROBED", 20)
    loaded, path = model
    on_cpu = probe(loaded)
    gpu_path(True)
    assert probe(load_model(path, "float32")).digest != on_cpu.digest
    gpu_path(False)
    assert probe(load_model(path, "float32")).digest == on_cpu.digest


def test_fingerprint_in_a_store_is_read_only_with_its_key() -> None:
    store, own, other = MemoryStore(None), Fingerprint.of({"threads": "2"}), Fingerprint.of({"threads": "1"}, "tiny")
    TierFingerprints(store, KEY, other, 4).keep()
    names = Names(KEY, other.digest, 4)
    store.put(state_name(names.digests("", bytes(8)), 2), [b"state"])
    seen, blind = TierFingerprints(store, KEY, own, 4), TierFingerprints(store, bytes(32), own, 4)
    for one in (seen, blind):
        one.learn(store.usage().states)
        assert one.count_others(store.usage().states) == 1
    assert [found.tag for found in seen.others] == [names.tag]
    assert blind.others == []
    renamed = store.get(fingerprint_name(names.tag))
    with pytest.raises(CorruptPart):
        Sealer(KEY).unseal(fingerprint_name("00000000"), renamed)


def test_only_a_few_other_fingerprints_are_asked_for() -> None:
    store = MemoryStore(None)
    for number in range(2 * MAX_OTHER_FINGERPRINTS):
        other = Fingerprint.of({"files": str(number)})
        TierFingerprints(store, KEY, other, 4).keep()
        for units in range(1, number + 2):
            store.put(state_name(Names(KEY, other.digest, 4).digests("", bytes(4 * units)), units), [b"state"])
    one = TierFingerprints(store, KEY, Fingerprint.of({}), 4)
    one.learn(store.usage().states)
    numbers = reversed(range(MAX_OTHER_FINGERPRINTS, 2 * MAX_OTHER_FINGERPRINTS))
    most = [Names(KEY, Fingerprint.of({"files": str(n)}).digest, 4).tag for n in numbers]
    assert [names.tag for names in one.others] == most


def test_changed_own_fingerprint_is_stored_again() -> None:
    store, own = MemoryStore(None), Fingerprint.of({"threads": "2"})
    kept = TierFingerprints(store, KEY, own, 4)
    kept.keep()
    name = fingerprint_name(kept.names.tag)
    store.delete([name])
    store.put(name, [b"spoilt"])
    TierFingerprints(store, KEY, own, 4).keep()
    assert Fingerprint.read(Sealer(KEY).unseal(name, store.get(name))) == own


def test_fingerprint_written_with_another_key_is_kept() -> None:
    """It cannot be distinguished from a damaged one; `headwater tiers verify --delete` removes both."""
    store, own = MemoryStore(None), Fingerprint.of({"threads": "2"})
    other = TierFingerprints(store, bytes(32), own, 4)
    other.keep()
    store.put(state_name(other.names.digests("", bytes(8)), 2), [b"state"])
    one = TierFingerprints(store, KEY, own, 4)
    one.learn(store.usage().states)
    one.keep()
    assert store.has([fingerprint_name(other.names.tag), fingerprint_name(one.names.tag)]) == [True, True]
