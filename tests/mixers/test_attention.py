"""Paged attention against a plain one, and against itself in other cuts, tables and company."""

import pytest
import torch

from headwater.layers.attention import GroupedAttention
from headwater.memory.arena import Arena
from headwater.mixers.attention import Attention
from headwater.mixers.rotary import TABLE_BLOCK, RotaryTable
from headwater.mixers.slices import Slice
from headwater.mixers.weights import Weights
from headwater.models.families import read_config
from headwater.spec import ModelSpec
from tests.mixers.attention_rig import AttentionRig

WIDTH = 96
LENGTH = 1100


def make_spec(heads: int = 6, kv_heads: int = 2, head_dim: int = 32, dtype: str = "float32") -> ModelSpec:
    config = {
        "model_type": "qwen3_5_text",
        "vocab_size": 64,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    }
    return read_config(config, dtype)


def attention_of(spec: ModelSpec) -> GroupedAttention:
    (layer,) = (layer for layer in spec.layers if isinstance(layer, GroupedAttention))
    return layer


class Rig(AttentionRig):
    """One attention layer with seeded weights and a poisoned arena."""

    def __init__(self, spec: ModelSpec, n_pages: int = 64) -> None:
        self.spec = spec
        self.shape = a = attention_of(spec)
        self.dtype = getattr(torch, spec.dtype_name)
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(self.dtype)

        self.qkv = random((2 * a.heads + 2 * a.kv_heads) * a.head_dim, WIDTH) * 3
        self.out = random(WIDTH, a.heads * a.head_dim)
        self.q_norm, self.k_norm = random(a.head_dim), random(a.head_dim)
        queries, keys = 2 * a.heads * a.head_dim, a.kv_heads * a.head_dim
        q, k, v = self.qkv.split([queries, keys, keys])
        tensors = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": self.out}
        tensors |= {"q_norm": self.q_norm, "k_norm": self.k_norm}
        self.layer = Attention(0, a, Weights({f"{name}.weight": t for name, t in tensors.items()}, self.dtype))
        self.arena = Arena(spec, n_pages)
        self.arena.pages.fill_(0xFF)
        self.x = torch.randn(LENGTH, WIDTH, generator=generator).to(self.dtype)

    def plain(self) -> torch.Tensor:
        """The layer's formulas in float64, all keys at once."""
        a = self.shape
        q_gate, k, v = (self.x.double() @ self.qkv.double().T).split(
            [2 * a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.head_dim], dim=1
        )
        q, gate = q_gate.view(LENGTH, a.heads, 2, a.head_dim).unbind(2)
        k, v = k.view(LENGTH, a.kv_heads, -1), v.view(LENGTH, a.kv_heads, -1)
        q, k = self._turned(q, self.q_norm), self._turned(k, self.k_norm)
        k, v = (x.repeat_interleave(a.heads // a.kv_heads, dim=1) for x in (k, v))
        score = torch.einsum("qhd,khd->hqk", q, k) * a.head_dim**-0.5
        score += torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
        seen = torch.einsum("hqk,khd->qhd", score.softmax(-1), v) * gate.sigmoid()
        return seen.flatten(1) @ self.out.double().T

    def _turned(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        a = self.shape
        x = x * (x.square().mean(-1, keepdim=True) + self.spec.norm_eps).rsqrt() * (1 + weight.double())
        half = a.rotary.dim // 2
        angle = torch.arange(LENGTH)[:, None].double() / a.rotary.theta ** (torch.arange(half).double() / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        first, second = x[..., :half], x[..., half : 2 * half]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], dim=-1)


def table_of(n_tokens: int, seed: int = 0, n_pages: int = 64) -> torch.Tensor:
    return torch.randperm(n_pages, generator=torch.Generator().manual_seed(seed))[: -(-n_tokens // 64)]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 32), (5, 1, 24), (4, 4, 16)])
def test_agrees_with_the_formulas(heads: int, kv_heads: int, head_dim: int) -> None:
    rig = Rig(make_spec(heads, kv_heads, head_dim))
    out = rig.prefill(table_of(LENGTH), [])
    assert (out.double() - rig.plain()).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuts_and_tables_change_no_bit(dtype: str) -> None:
    spec = make_spec(dtype=dtype)
    whole = Rig(spec).prefill(table_of(LENGTH), [])
    assert not whole.isnan().any(), "read what was never written"
    every_page = list(range(64, LENGTH, 64))
    for i, bounds in enumerate([[64], [512], [448, 576], [1088], every_page]):
        assert torch.equal(Rig(spec).prefill(table_of(LENGTH, seed=i), bounds), whole), bounds


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_end_of_a_slice_changes_no_bit(dtype: str) -> None:
    spec = make_spec(dtype=dtype)
    whole = Rig(spec).prefill(table_of(LENGTH), [])
    for length in (1, 2, 5, 63, 65, 200, 511, 513, 700):
        assert torch.equal(Rig(spec).prefill(table_of(LENGTH), [], length), whole[:length]), length


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_decode_is_equal_by_itself_and_among_others(kv_heads: int, dtype: str) -> None:
    spec = make_spec(kv_heads=kv_heads, dtype=dtype)
    lengths = [1, 2, 64, 65, 300, 511, 512, 513]
    x = Rig(spec).x[:8].flip(0)

    def rig_with_prefixes() -> tuple[Rig, list[tuple[int, torch.Tensor]]]:
        rig, decodes = Rig(spec), []
        pages = torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist()
        for length in lengths:
            table = torch.tensor([pages.pop() for _ in range(-(-length // 64))])
            if length > 1:
                rig.run([Slice(0, length - 1, 0, 0, table, 0)], [], rig.x[: length - 1])
            decodes.append((length - 1, table))
        return rig, decodes

    rig, decodes = rig_with_prefixes()
    together = rig.run([], decodes, x)
    assert not together.isnan().any()
    rig, decodes = rig_with_prefixes()
    alone = torch.cat([rig.run([], [decode], x[i : i + 1]) for i, decode in enumerate(decodes)])
    assert torch.equal(together, alone)


def test_pages_before_write_from_are_read_and_not_written() -> None:
    rig = Rig(make_spec())
    table = table_of(LENGTH)
    whole = rig.prefill(table, [])
    before = rig.arena.pages.clone()
    rig.x = rig.x.clone()
    again = rig.run([Slice(0, LENGTH - 128, 128, 0, table, 6)], [], rig.x[128:])
    assert torch.equal(again, whole[128:])
    rig.x += 1.0
    rig.run([Slice(0, 640 - 128, 128, 0, table[:10], 6)], [], rig.x[128:640])
    changed = [page for page in range(64) if not torch.equal(rig.arena.pages[page], before[page])]
    assert sorted(changed) == sorted(table[6:10].tolist())


def test_a_slice_that_writes_nothing_is_computed() -> None:
    rig = Rig(make_spec())
    table = table_of(LENGTH)
    whole = rig.prefill(table, [])
    again = rig.run([Slice(0, 256, 64, 0, table[:5], 5)], [], rig.x[64:320])
    assert torch.equal(again, whole[64:320])


def test_rotation_depends_only_on_the_position() -> None:
    rotary = attention_of(make_spec()).rotary
    long, short = RotaryTable(rotary, "cpu"), RotaryTable(rotary, "cpu")
    position = torch.tensor([0, 5, TABLE_BLOCK - 1, TABLE_BLOCK + 3])
    at_once = long.at(position)
    for i in range(len(position)):
        assert torch.equal(short.at(position[i : i + 1])[0], at_once[i])


def test_a_table_of_rotations_is_copied_once_for_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix of 128,000 tokens that is loaded needs 32 blocks at once."""
    rotary = attention_of(make_spec()).rotary
    at_once, by_block = RotaryTable(rotary, "cpu"), RotaryTable(rotary, "cpu")
    joined, cat = [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts: (joined.append(len(parts)), cat(parts))[1])
    table = at_once.until(3 * TABLE_BLOCK + 1)
    assert joined == [1 + 4]
    assert at_once.until(4 * TABLE_BLOCK) is table
    for end in range(1, 4 * TABLE_BLOCK + 1, TABLE_BLOCK):
        by_block.until(end)
    assert by_block.until(1).equal(table)
