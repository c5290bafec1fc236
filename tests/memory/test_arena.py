"""Pages of KV: exactly the written content is read back."""

import ctypes
import resource
import runpy
import sys
import threading
from pathlib import Path

import pytest
import torch

from headwater.memory import arena as arena_module
from headwater.memory.arena import HUGE_BYTES, Arena, LazyBytes
from headwater.models.families import read_config
from headwater.spec import KEY_BLOCK, ModelSpec

CONFIG = {
    "model_type": "qwen3_5_text", "vocab_size": 64, "hidden_size": 48, "intermediate_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "linear_attention", "full_attention", "full_attention"],
    "num_attention_heads": 3, "num_key_value_heads": 3,
    "head_dim": 21,  # a page of 64 tokens in bfloat16 is not a multiple of 512 bytes
    "partial_rotary_factor": 0.2, "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
}  # fmt: skip


def filled(n: int, spec: ModelSpec, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (n, spec.layers[spec.attention_layers[0]].kv_widths[0])
    dtype = getattr(torch, spec.dtype_name)
    return torch.randn(shape, generator=generator).to(dtype), torch.randn(shape, generator=generator).to(dtype)


def poisoned(spec: ModelSpec, n_pages: int) -> Arena:
    arena = Arena(spec, n_pages)
    arena.pages.fill_(0xFF)  # NaN in every floating-point dtype
    return arena


@pytest.mark.parametrize("page_size", [64, 128, 192, 1024])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_written_tokens_come_back_and_zeros_after_them(dtype: str, page_size: int) -> None:
    spec = read_config(CONFIG, dtype, page_size)
    assert spec.page_bytes % 512 == 0
    if (dtype, page_size) == ("bfloat16", 64):
        assert spec.page_bytes > spec.kv_bytes_per_token * page_size
    arena = poisoned(spec, n_pages=24)
    length = 700
    table = torch.randperm(24, generator=torch.Generator().manual_seed(0))[: -(-length // page_size)]
    position = torch.arange(length)
    for layer in spec.attention_layers:
        k, v = filled(length, spec, layer)
        arena.write(layer, table[position // page_size], position % page_size, k, v)
    for layer in spec.attention_layers:
        k, v = filled(length, spec, layer)
        got_k, got_v = arena.gather(layer, table, length)
        assert got_k.shape[0] == got_v.shape[0] == 2 * KEY_BLOCK
        assert torch.equal(got_k[:length], k)
        assert torch.equal(got_v[:length], v)
        assert not got_k[length:].any()
        assert not got_v[length:].any()


@pytest.mark.parametrize("page_size", [64, 1024])
def test_gather_never_sees_scratch_of_another_gather(page_size: int) -> None:
    spec = read_config(CONFIG, "float32", page_size)
    arena = poisoned(spec, n_pages=24)
    position = torch.arange(1500)
    k, v = filled(1500, spec, 0)
    arena.write(0, position // page_size, position % page_size, k, v)
    for length in [1500, 3, 600, 511, 1030, 1, 513, 1500, 700, 1, 2]:
        got_k, got_v = arena.gather(0, torch.arange(24), length)
        assert got_k.shape[0] == -(-length // KEY_BLOCK) * KEY_BLOCK
        assert torch.equal(got_k[:length], k[:length])
        assert torch.equal(got_v[:length], v[:length])
        assert not got_k[length:].any(), length
        assert not got_v[length:].any(), length


def test_pages_do_not_overlap() -> None:
    spec = read_config(CONFIG, "float32")
    arena = Arena(spec, n_pages=3)
    k, v = filled(64, spec, 0)
    first, second, _ = spec.attention_layers
    arena.write(second, torch.full((64,), 1), torch.arange(64), k, v)
    assert not arena.pages[0].any()
    assert not arena.pages[2].any()
    assert arena.pages[1].any()
    assert not arena.gather(first, torch.tensor([1]), 64)[0].any(), "of another layer"


def test_memory_that_is_not_touched_is_not_resident() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    spec = read_config(CONFIG, "float32")
    before = resident()
    arena = Arena(spec, n_pages=4_000_000_000 // spec.page_bytes)
    arena.pages[-1].fill_(1)
    assert resident() - before < 100_000_000


def test_first_use_of_an_arena_faults_once_per_2_mb() -> None:
    """Loads fill fresh memory: faults of 4 KB took twice the time of reading and checking what they read."""
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.is_file() or "[never]" in enabled.read_text():
        pytest.skip("the system has no huge pages")
    spec = read_config(CONFIG, "float32")
    arena = Arena(spec, n_pages=32_000_000 // spec.page_bytes)
    assert arena._memory._map is not None
    assert len(arena._memory._map) % HUGE_BYTES == 0, "so that Linux lets it begin at a large page"
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    arena.pages.fill_(1)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 32_000_000 / 4096 / 4


def gathered(expected: int) -> tuple[int, list[torch.Tensor]]:
    """Gather 64,000 tokens after memory for `expected` was provided; return page faults, and the gathered tensors."""
    spec = read_config(CONFIG, "float32")
    arena = Arena(spec, n_pages=1000)
    arena.pages.view(torch.float32).copy_(torch.arange(spec.page_bytes // 4).expand(1000, -1))
    arena.expect(expected)
    table = torch.arange(1000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    rows = arena.gather(spec.attention_layers[0], table, 64_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, [one.clone() for one in rows]


def test_scratch_memory_that_was_expected_takes_no_page_faults() -> None:
    lazy = LazyBytes(HUGE_BYTES, huge=True)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    lazy.provide(HUGE_BYTES)
    if resource.getrusage(resource.RUSAGE_THREAD).ru_minflt == before:
        pytest.skip("the system provides no memory ahead")
    (without, known), (some, first), (all_of_it, second) = gathered(0), gathered(3000), gathered(63_000)
    assert all_of_it < 8 < without, "the test's own objects may take some"
    assert some > 8
    for found in (first, second):
        assert all(one.equal(other) for one, other in zip(found, known, strict=True))


def test_page_that_was_provided_takes_no_page_fault() -> None:
    spec = read_config(CONFIG, "float32")
    arena = Arena(spec, 3 * HUGE_BYTES // spec.page_bytes)
    page = arena.n_pages // 2
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    arena.provide(page)
    provided = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    if provided == before:
        pytest.skip("the system provides no memory ahead")
    arena.pages[page] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - provided < 2, "the test's own objects may take one"
    assert not arena.pages[page - 1].any()


def test_memory_may_be_expected_while_steps_gather() -> None:
    spec = read_config(CONFIG, "float32")
    arena = Arena(spec, n_pages=40)
    arena.pages.view(torch.float32).copy_(torch.rand(40, spec.page_bytes // 4))
    layer, table, done = spec.attention_layers[0], torch.arange(40), threading.Event()

    def expecting() -> None:
        n = 0
        while not done.is_set():
            n = (n + 17) % 4000
            arena.expect(n)

    thread = threading.Thread(target=expecting)
    thread.start()
    try:
        for length in range(100, 2500, 30):
            whole, rows = arena.read(layer, table, 0, length), arena.gather(layer, table, length)
            pairs = zip(rows, whole, strict=True)
            assert all(one[:length].equal(other) and not one[length:].any() for one, other in pairs)
    finally:
        done.set()
        thread.join()


def test_without_madvise_discarded_memory_reads_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.memory.arena._MADVISE", None)  # as on macOS
    arena = poisoned(read_config(CONFIG, "float32"), n_pages=3)
    arena.discard([1])
    assert not arena.pages[1].any()
    assert (arena.pages[[0, 2]] == 0xFF).all()


@pytest.mark.parametrize(("platform", "libc"), [("darwin", None), ("linux", "without")])
def test_arena_imports_if_madvise_differs_or_is_missing(
    platform: str, libc: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    if libc is not None:
        monkeypatch.setattr(ctypes, "CDLL", lambda *given, **more: object())
    assert runpy.run_path(arena_module.__file__)["_MADVISE"] is None
