"""Verdict of the self-check, stored in a file, so that later starts need not prove again that hits are exact.

Only a positive verdict is stored. Its file has a key with everything that may affect the bits of kernels, and is valid
only for that key. Without a usable folder the server runs the self-check at each start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from headwater import machine
from headwater.cache_folder import own_folder, write_whole
from headwater.engine.proof.second_compiler import compiling_beside
from headwater.engine.proof.selfcheck import Progress, SelfCheck, no_progress, self_check
from headwater.mixers.gpu import has_kernels
from headwater.mixers.linear import guarded_modes
from headwater.mixers.numerics import MODES
from headwater.spec import ModelSpec

PACKAGE = Path(__file__).parents[2]
PACKAGES = ("headwater", "llvmlite", "numba", "triton")
PACKAGES_OF_CARDS = ("nvidia-cublas", "nvidia-cublas-cu12")
DRIVER = Path("/proc/driver/nvidia/version")  # it compiles kernels that come without code for the card
# what computes, and what checks it
CODE = (
    "kernels", "layers", "memory", "mixers", "draft/drafter.py", "engine/proof",
    "models/build.py", "models/hybrid.py", "spec.py",
)  # fmt: skip
# beginnings of variables that choose kernels, or the libraries that have them
VARIABLES = (
    "ATEN_", "BLIS_", "CUBLAS_", "CUDA_", "DNNL_", "GLIBC_TUNABLES", "GOMP_", "KMP_", "LD_LIBRARY_PATH", "LD_PRELOAD",
    "LRU_CACHE_CAPACITY", "MKL_", "NUMBA_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "TORCH", "TRITON_",
)  # fmt: skip
MAX_VERDICT_FILES = 32  # files; the oldest are removed, as of earlier versions, models and threads

log = logging.getLogger("headwater.engine")


def verdict(
    spec: ModelSpec,
    device: str = "cpu",
    reproducible: bool = True,
    recheck: bool = False,
    progress: Progress = no_progress,
) -> SelfCheck:
    """Return the stored verdict for this model and machine; without one, or with `recheck`, check and store it."""
    if not reproducible:
        return self_check(spec, device, reproducible)
    key = key_of(spec, device)
    known = None if recheck else read(key)
    if known is not None:
        return known
    with compiling_beside(spec, device):
        check = self_check(spec, device, progress=progress)
    if not check.deterministic:
        return check
    proven = replace(check, proven=datetime.now(UTC).replace(microsecond=0))
    keep(key, proven)
    return proven


def key_of(spec: ModelSpec, device: str = "cpu") -> dict[str, str]:
    """Return all that the bits of the model's kernels may depend on; the process must be prepared by then."""
    variables = (f"{name}={value}" for name, value in os.environ.items() if name.startswith(VARIABLES))
    layers = sorted({repr(layer) for layer in spec.layers})
    return {
        "processor": f"{machine.cpu().name} {_digest(*machine.identity(), *machine.cpu().features)}",
        "cores": ",".join(map(str, machine.affinity())),
        "device": f"{_name_of(device)}{', Triton' if has_kernels(device) else ''}",
        "torch": f"{torch.__version__} {_digest(torch.__config__.show(), torch.get_float32_matmul_precision())}",
        "libc": " ".join(platform.libc_ver()),
        **{name: str(version) for name, version in machine.versions(*PACKAGES).items()},
        "code": _digest(*_code()),
        "products": " ".join(guarded_modes(device)),
        "variables": " ".join(sorted(variables)),
        "threads": str(torch.get_num_threads()),
        "dtype": spec.dtype_name,
        "weights": f"{spec.weights} {spec.weights_held}",
        "shapes": _digest(f"{spec.hidden_size} {spec.vocab_size} {spec.tied} {spec.page_size}", *layers),
    }


def read(key: Mapping[str, str]) -> SelfCheck | None:
    """Return the verdict that is kept for the key; None if there is none, or its file or folder is not usable."""
    try:
        found = json.loads(_file(key).read_text(encoding="utf-8"))
        if found["key"] == key and found["mode"] in MODES:
            return SelfCheck(True, None, found["mode"], datetime.fromisoformat(found["proven"]).astimezone(UTC))
    except OSError:  # there is none; if that is because none can be kept, `keep` says why
        return None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        log.info("no kept verdict of the self-check can be read: %s: %s", type(error).__name__, error)
    return None


def keep(key: Mapping[str, str], check: SelfCheck) -> None:
    """Write a yes to its file, whole or not at all. If that fails, a line in the log says why."""
    assert check.deterministic
    assert check.proven is not None
    text = json.dumps({"mode": check.mode, "proven": check.proven.isoformat(), "key": key}, indent=1)
    try:
        file = _file(key)
        write_whole(file, [text], 0o600)
    except OSError as error:
        log.warning("exactness will be proven again at the next start, because the verdict cannot be kept: %s", error)
        return
    with suppress(OSError):  # another start may remove the same files
        kept = sorted(file.parent.glob("exactness-*.json"), key=lambda path: path.stat().st_mtime)
        for old in kept[:-MAX_VERDICT_FILES]:
            old.unlink(missing_ok=True)


def _file(key: Mapping[str, str]) -> Path:
    """Return the file for a key, in a folder that only this user can write to. Raises OSError if there is none."""
    return own_folder() / f"exactness-{_digest(json.dumps(key, sort_keys=True))}.json"


def _name_of(device: str) -> str:
    if torch.device(device).type != "cuda":
        return f"{device} {torch.backends.cpu.get_cpu_capability()}"
    card = torch.cuda.get_device_properties(device)
    driver = DRIVER.read_text() if DRIVER.exists() else ""
    libraries = _digest(str(torch.version.cuda), driver, *map(str, machine.versions(*PACKAGES_OF_CARDS).values()))
    return f"{card.name} {card.major}.{card.minor}, {card.multi_processor_count} multiprocessors, {libraries}"


def _code() -> list[str]:
    """Return the source of everything that the verdict is about."""
    folders_and_files = [PACKAGE / name for name in CODE]
    files = [file for path in folders_and_files for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    return [f"{file.relative_to(PACKAGE)}\n{file.read_text(encoding='utf-8')}" for file in files if file.is_file()]


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]
