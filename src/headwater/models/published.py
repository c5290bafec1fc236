"""Files of much-run hybrids on hubs, with sizes computed from the layers of the lab's profiles. No torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from headwater.layers.layer import is_product
from headwater.models.gguf.held import HELD
from headwater.models.profiles import PROFILES, Profile
from headwater.spec import WEIGHTS, Packed


class Published(NamedTuple):
    """A model on the hub: its profile, the GGUF file, and the publisher's own repository."""

    name: str
    profile: str
    gguf: str  # repository
    file: str
    folder: str  # repository


MODELS = (
    Published(
        "Qwen3.6-35B-A3B", "qwen3.5-35b-a3b", "lmstudio-community/Qwen3.6-35B-A3B-GGUF",
        "Qwen3.6-35B-A3B-Q4_K_M.gguf", "Qwen/Qwen3.6-35B-A3B",
    ),
    Published("Qwen3.5-9B", "qwen3.5-9b", "unsloth/Qwen3.5-9B-GGUF", "Qwen3.5-9B-Q4_K_M.gguf", "Qwen/Qwen3.5-9B"),
    Published(
        "Qwen3-Next-80B-A3B", "qwen3-next-80b-a3b", "Qwen/Qwen3-Next-80B-A3B-Instruct-GGUF",
        "Qwen3-Next-80B-A3B-Instruct-Q4_K_M.gguf", "Qwen/Qwen3-Next-80B-A3B-Instruct",
    ),
    Published(
        "LFM2.5-8B-A1B", "lfm2.5-8b-a1b", "LiquidAI/LFM2.5-8B-A1B-GGUF", "LFM2.5-8B-A1B-Q4_K_M.gguf",
        "LiquidAI/LFM2.5-8B-A1B",
    ),
    Published(
        "LFM2-8B-A1B", "lfm2-8b-a1b", "LiquidAI/LFM2-8B-A1B-GGUF", "LFM2-8B-A1B-Q4_K_M.gguf", "LiquidAI/LFM2-8B-A1B"
    ),
    Published(
        "Granite-4.0-H-Tiny", "granite-4.0-h-tiny", "ibm-granite/granite-4.0-h-tiny-GGUF",
        "granite-4.0-h-tiny-Q4_K_M.gguf", "ibm-granite/granite-4.0-h-tiny",
    ),
    Published(
        "Granite-4.0-H-Small", "granite-4.0-h-small", "ibm-granite/granite-4.0-h-small-GGUF",
        "granite-4.0-h-small-Q4_K_M.gguf", "ibm-granite/granite-4.0-h-small",
    ),
    Published(
        "Nemotron-3-Nano-30B-A3B", "nemotron-3-nano-30b-a3b", "unsloth/Nemotron-3-Nano-30B-A3B-GGUF",
        "Nemotron-3-Nano-30B-A3B-Q4_K_M.gguf", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    ),
    Published(
        "Kimi-Linear-48B-A3B", "kimi-linear-48b-a3b", "bartowski/moonshotai_Kimi-Linear-48B-A3B-Instruct-GGUF",
        "moonshotai_Kimi-Linear-48B-A3B-Instruct-Q4_K_M.gguf", "moonshotai/Kimi-Linear-48B-A3B-Instruct",
    ),
    Published(
        "Falcon-H1-7B", "falcon-h1-7b", "tiiuae/Falcon-H1-7B-Instruct-GGUF", "Falcon-H1-7B-Instruct-Q4_K_M.gguf",
        "tiiuae/Falcon-H1-7B-Instruct",
    ),
)  # fmt: skip
SOURCE = re.compile(r"(?:huggingface\.co/)?([\w.-]+/[\w.-]+), config\.json")  # of a profile
PROCESS_BYTES, DEFAULT_MEMORY = 600_000_000, 4_000_000_000
CONTEXTS = (32_768, 131_072)  # tokens
PAGE_SIZE, CHECKPOINTS = 64, 8
SUPER = 256  # inputs of a block of the K types; the types for other widths:
NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
FILE_BITS = {"F32": 32, "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625, "Q5_0": 5.5, "Q5_1": 6, "Q8_0": 8.5}
HELD_BITS = {name: 8 * element_bytes for name, element_bytes in HELD.values()}


class Fitting(NamedTuple):
    """Flags that serve a publisher's own repository, and the bytes of its download and of memory."""

    flags: tuple[str, ...]
    download: int
    needed: int


def repository_of(profile: str) -> str | None:
    """Return the publisher's repository of a profile's model; None if it is not known."""
    found = SOURCE.match(PROFILES[profile].source)
    return next((one.folder for one in MODELS if one.profile == profile), None) or (found and found[1])


def fitting(one: Published, memory: int) -> tuple[Fitting, bool]:
    """Return the form with the most bits that fits into `memory`, else the smallest; and whether it fits.

    `--memory` is the server's default, or what a conversation of CONTEXTS[0] tokens needs.
    """
    profile = PROFILES[one.profile]
    least = math.ceil(cache_bytes(profile, CONTEXTS[0]) / 1e8) * 100_000_000
    download = replace(profile, weights="auto").weight_bytes
    for weights in WEIGHTS:
        held = replace(profile, weights=weights).weight_bytes + PROCESS_BYTES
        flags = () if weights == "auto" else ("--weights", weights)
        for cache, more in ((DEFAULT_MEMORY, ()), (least, ("--memory", f"{least / 1e9:.1f}GB"))):
            found = Fitting((*flags, *more), download, held + cache)
            if found.needed <= memory:
                return found, True
    return found, False


def cache_bytes(profile: Profile, tokens: int) -> int:
    """Return the memory for the KV of one conversation, its checkpoints, and the states of a running request."""
    page_bytes = profile.bytes_of_page(PAGE_SIZE)
    kv_pages = -(-tokens // PAGE_SIZE) if profile.kv_bytes_per_token else 0
    return page_bytes * (kv_pages + (CHECKPOINTS + 1) * -(-profile.checkpoint_bytes // page_bytes))


def file_bytes(profile: Profile) -> float:
    """Return the bytes of a Q4_K_M file's tensors."""
    return sum(n * FILE_BITS[kind] / 8 for kind, n in (_tables(profile) + _layers(profile)).items())


def packed(profile: Profile) -> Packed:
    """Return how the weights of such a file are held."""
    layers = Counter({kind: n for kind, n in _layers(profile).items() if kind != "F32"})
    return Packed("Q4_K", _mean_held(layers), _mean_held(_tables(profile)))


def _mean_held(elements: Counter[str]) -> float:
    return sum(n * HELD_BITS[kind] / 8 for kind, n in elements.items()) / elements.total()


def _tables(profile: Profile) -> Counter[str]:
    """Return the elements of embedding and head by their types."""
    n = profile.vocab_size * profile.hidden_size
    kinds = ["Q6_K"] if profile.tied else ["Q4_K", "Q6_K"]
    return Counter({_of_width(kind, profile.hidden_size): n for kind in kinds})


def _layers(profile: Profile) -> Counter[str]:
    """Return the elements of all layers by their types."""
    feed_forwards = sum(n for layer, n in profile.layers if layer.kind in ("mlp", "moe"))
    share, found = _share_of_more_bits(feed_forwards), Counter[str]()
    for layer, count in profile.layers:
        for name, shape in layer.tensors().items():
            for kind, part in _types(name, shape, share):
                found[_of_width(kind, shape[-1])] += round(count * part * math.prod(shape))
    return found


def _types(name: str, shape: tuple[int, ...], share: float) -> Iterator[tuple[str, float]]:
    """Yield the types of a kind of tensor, each with the share of layers in which it has that type."""
    if not is_product(name, shape) or name in ("gate.weight", "shared_expert_gate.weight"):
        yield "F32", 1.0
    elif name.endswith(("down_proj.weight", "v_proj.weight")):
        yield from (("Q6_K", share), ("Q4_K", 1 - share))
    else:
        yield "Q5_K" if name == "in_proj_qkv.weight" else "Q4_K", 1.0


def _share_of_more_bits(n: int) -> float:
    """Return in which share of n layers llama.cpp gives some tensors more bits: the ends, and a third between."""
    return sum(i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2 for i in range(n)) / n


def _of_width(kind: str, n_in: int) -> str:
    return kind if n_in % SUPER == 0 else NARROW.get(kind, kind)
