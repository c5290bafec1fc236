"""Fingerprint of a model on this machine: servers with equal fingerprints compute states with equal bits.

It covers the weights' files, the shapes, formats and settings of the computation, the code of the kernels, the machine
and its libraries, and a probe: the bits that this process gives a fixed prompt.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3

from headwater.engine.meter import PROBED
from headwater.engine.proof.verdict import PACKAGE, key_of
from headwater.memory.arena import Arena
from headwater.memory.slots import StateMemory
from headwater.mixers.batch import StepBatch
from headwater.mixers.slices import Slice
from headwater.models.digest import weights_digest
from headwater.models.load import LoadedModel
from headwater.tiers.fingerprint import Fingerprint

# code that computes segments, in addition to the code of the verdict's key: the probe has no segment
BUILDING = ("engine/runner.py", "memory/slots.py", "models/hybrid.py", "schedule/kinds/segment.py")


@dataclass(frozen=True)
class Probe:
    """Bits that the prefill of a fixed prompt gave, as a digest, and the seconds that it took."""

    digest: str
    seconds: float


def probe(loaded: LoadedModel) -> Probe:
    """Prefill a fixed prompt of 192 tokens in memory of its own, twice: the second time is measured."""
    spec, device = loaded.spec, torch.device(loaded.device)
    pages = -(-PROBED // spec.page_size)
    arena, states = Arena(spec, pages, device), StateMemory(spec.state, 1, spec.state.bytes, device)
    token_N = torch.tensor([(7919 * i + 13) % spec.vocab_size for i in range(PROBED)], device=device)
    position_N, table_P = torch.arange(PROBED, device=device), torch.arange(pages, device=device)
    none_B = torch.empty(0, dtype=torch.int64, device=device)
    one = Slice(0, PROBED, 0, 0, table_P, 0)
    batch = StepBatch(token_N, position_N, (one,), none_B, (), position_N[-1:])
    for _ in range(2):
        states.zero(0)
        begun = time.perf_counter()
        logits_RV = loaded.model.forward(batch, arena, states).cpu()  # which waits for a card
        seconds = time.perf_counter() - begun
    running = blake3()
    for bits in (arena.pages, states.bytes_RB[0], logits_RV.contiguous().view(torch.uint8)):
        running.update(bits.contiguous().cpu().numpy().tobytes())
    return Probe(running.hexdigest(), seconds)


def fingerprint(loaded: LoadedModel, path: Path, mode: str, probed: Probe) -> Fingerprint:
    """Return the fingerprint of a model that was loaded from a folder or a file."""
    spec = loaded.spec
    values = {
        **key_of(spec, loaded.device),
        "mode": mode,
        "page": str(spec.page_size),
        "layout": f"{spec.page_bytes} {spec.state.bytes} {spec.max_length} {spec.transition.bytes}",
        "building": _sources(BUILDING),
        "files": weights_digest(path),
        "probe": probed.digest,
    }
    return Fingerprint.of(values, loaded.name)


def _sources(names: Iterable[str]) -> str:
    files = (PACKAGE / name for name in names)
    return blake3(b"\0".join(file.read_bytes() for file in files if file.is_file())).hexdigest()
