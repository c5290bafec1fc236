"""`headwater inspect`: costs of a model's cache."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from headwater.cli.common import Dtype, Memory, Model, PageSize, commands, console, figures_table
from headwater.config import ServeConfig
from headwater.models.embedded import embedded
from headwater.models.families import read_folder
from headwater.setting import parse_bytes
from headwater.spec import ModelSpec

INSPECTED_LENGTHS = (0, 1024, 8192, 32768, 131072)  # tokens


@commands.command()
def inspect(
    model: Model = None,
    memory: Memory = "4GB",
    dtype: Dtype = "auto",
    page_size: PageSize = 64,
) -> None:
    """Print the costs of a model's cache, without loading its weights."""
    spec = read_spec(model or embedded(), dtype, page_size)
    budget = parse_bytes(memory)
    n_pages = spec.layout(budget).n_pages
    console.print(cost_table(spec))
    console.print(flops_table(spec))
    fit = figures_table(None, f"capacity of {budget:,} bytes", "alone")
    fit.add_row("tokens of KV", f"{n_pages * page_size:,}" if spec.kv_pages_per_unit else "any number")
    fit.add_row("checkpoints", f"{n_pages // spec.checkpoint_pages:,}" if spec.checkpoint_pages else "none needed")
    console.print(fit)


def read_spec(path: Path, dtype: str, page_size: int) -> ModelSpec:
    """Read the sizes of a checkpoint's model; dtype `auto` is that of its weights."""
    ServeConfig(model=path, dtype=dtype, page_size=page_size)  # checks the three
    return read_folder(path, dtype, page_size)


def cost_table(spec: ModelSpec) -> Table:
    layers = ", ".join(f"{n} {kind}" for kind, n in spec.layers_by_kind.items())
    table = figures_table(f"{spec.model_type}, {spec.dtype_name}: {layers}", "", "bytes", "equals")
    table.add_row("weights", f"{spec.parameter_bytes:,}", "")
    table.add_row("KV of a token", f"{spec.kv_bytes_per_token:,}", "")
    table.add_row(f"a page ({spec.page_size} tokens)", f"{spec.page_bytes:,}", "")
    in_tokens = f"{spec.checkpoint_bytes / spec.kv_bytes_per_token:,.0f} tokens of KV" if spec.attention_layers else ""
    pages = f"{spec.checkpoint_pages:,} pages"
    table.add_row("a checkpoint", f"{spec.checkpoint_bytes:,}", f"{in_tokens}; {pages}" if in_tokens else pages)
    return table


def flops_table(spec: ModelSpec) -> Table:
    """Return FLOPs of one more token after each length, and of the prefill that a hit of that length saves."""
    table = figures_table("FLOPs", "after tokens", "one more token", "share of attention", "saved by a hit")
    attention = {spec.layers[i].kind for i in spec.attention_layers}
    for length in (n for n in INSPECTED_LENGTHS if n < spec.max_length):
        kinds = spec.flops_by_kind(length, length + 1)
        total = sum(kinds.values()) - kinds["head"]
        saved = spec.prefill_flops(0, length) - spec.flops_by_kind(0, length)["head"]
        share = f"{sum(kinds[kind] for kind in attention) / total:.0%}"
        table.add_row(f"{length:,}", f"{total / 1e6:,.1f} M", share, f"{saved / 1e9:,.2f} G")
    return table
