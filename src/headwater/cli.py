"""The command line. An error of the user's is one line, and exit code 2."""

from __future__ import annotations

import json
import logging
import signal
import socket
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headwater.cache.eviction import make_eviction
from headwater.cache.placement import make_placement
from headwater.config import DECODE_REUSE, DEVICES, DTYPES, POOLS, ServeConfig, parse_bytes, user_cache_dir
from headwater.errors import CheckpointError, ConfigError, HeadwaterError
from headwater.spec import ModelSpec

GRACE = 5  # seconds that open answers have to end when the server stops
INSPECTED_LENGTHS = (0, 1024, 8192, 32768, 131072)  # tokens
ClickException: Any = typer.BadParameter.mro()[2]  # of the click that this typer brings, or the one it imports

commands = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
console = Console()

Model = Annotated[Path | None, typer.Argument(help="Folder of a checkpoint; without it, the embedded default.")]
Memory = Annotated[str, typer.Option(help="For KV, checkpoints and running states: 4GB is 10^9, 4GiB is 2^30.")]
Dtype = Annotated[str, typer.Option(help=f"To compute in: {', '.join(DTYPES)}.")]
PageSize = Annotated[int, typer.Option(help="Tokens a page: a multiple of 64.")]


def app() -> None:
    """The `headwater` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line; returns its exit code."""
    try:
        return commands(arguments, standalone_mode=False, prog_name="headwater") or 0
    except ClickException as error:
        message = error.format_message()
    except (HeadwaterError, OSError) as error:
        message = str(error)
    except KeyboardInterrupt:
        return 130
    print(f"headwater: {' '.join(message.split())}", file=sys.stderr)
    return 2


@commands.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Exact prefix caching for hybrid language models."""
    if show_version:
        print(f"headwater {version('headwater')}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@commands.command()
def serve(
    model: Model = None,
    memory: Memory = "4GB",
    device: Annotated[str, typer.Option(help=f"One of {', '.join(DEVICES)}.")] = "cpu",
    dtype: Dtype = "auto",
    page_size: PageSize = 64,
    max_running: Annotated[int, typer.Option(help="Requests that compute at once.")] = 16,
    max_tokens_per_step: Annotated[int, typer.Option(help="Tokens of one step, prefill and decode.")] = 1024,
    placement: Annotated[str, typer.Option(help="Where checkpoints go: structural, branch, every_block(4), ...")] = (
        "structural"
    ),
    eviction: Annotated[str, typer.Option(help="What goes first: lru, seglen, ...")] = "lru",
    pool: Annotated[str, typer.Option(help=f"One of {', '.join(POOLS)}.")] = "unified",
    state_fraction: Annotated[float | None, typer.Option(help="States' share of a split pool.")] = None,
    decode_reuse: Annotated[
        str, typer.Option(help=f"What of an answer the next turn may reuse: {', '.join(DECODE_REUSE)}.")
    ] = "canonical",
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Without: every prompt is computed whole.")] = True,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8000,
    threads: Annotated[int | None, typer.Option(help="To compute with; without it, as many as torch takes.")] = None,
    reproducible: Annotated[
        bool, typer.Option("--reproducible/--no-reproducible", help="Without: a hit may change an answer's last bits.")
    ] = True,
) -> None:
    """Serve a checkpoint behind an OpenAI-compatible API."""
    make_placement(placement)
    make_eviction(eviction)
    config = ServeConfig(
        model=model,
        memory=parse_bytes(memory),
        device=device,
        dtype=dtype,
        page_size=page_size,
        max_running=max_running,
        max_tokens_per_step=max_tokens_per_step,
        placement=placement,
        eviction=eviction,
        pool=pool,
        state_fraction=state_fraction,
        decode_reuse=decode_reuse,
        cache=cache,
        host=host,
        port=port,
        threads=threads,
        reproducible=reproducible,
    )
    serve_until_stopped(config)


@commands.command()
def inspect(
    model: Model = None,
    memory: Memory = "4GB",
    dtype: Dtype = "auto",
    page_size: PageSize = 64,
) -> None:
    """Print what a model's cache costs, without loading its weights."""
    spec = read_spec(model or default_checkpoint(), dtype, page_size)
    budget = parse_bytes(memory)
    n_pages = spec.layout(budget).n_pages
    console.print(cost_table(spec))
    console.print(flops_table(spec))
    fit = Table()
    fit.add_column(f"what fits in {budget:,} bytes", no_wrap=True)
    fit.add_column("alone", justify="right")
    fit.add_row("tokens of KV", f"{n_pages * page_size:,}" if spec.kv_pages_per_unit else "any number")
    fit.add_row("checkpoints", f"{n_pages // spec.checkpoint_pages:,}" if spec.checkpoint_pages else "none needed")
    console.print(fit)


def serve_until_stopped(config: ServeConfig) -> None:
    """Bind first, so that a taken port is told before a model is loaded; then load, serve, and stop in order."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with bound_socket(config.host, config.port) as listener:
        # torch takes a second to import: `--help` and `inspect` do without
        import uvicorn

        from headwater.engine.engine import Engine
        from headwater.server.app import create_app

        if config.model is None:
            print(
                "No model given: serving a tiny embedded one. Its answers are noise, its caching is real.", flush=True
            )
        engine = Engine.load(config)
        settings = uvicorn.Config(
            create_app(engine, config), log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE
        )
        host, port = listener.getsockname()[:2]
        print(f"Headwater {version('headwater')} serves {engine.model_name} on http://{host}:{port}/v1", flush=True)
        print(f"Deterministic: {engine.health()['deterministic']}", flush=True)
        engine.start()
        try:
            uvicorn.Server(settings).run(sockets=[listener])
        except KeyboardInterrupt:
            pass  # the server has stopped in order by now
        finally:
            engine.stop()


def bound_socket(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def default_checkpoint() -> Path:
    from headwater.models.tiny import ensure_default  # imports torch

    return ensure_default(user_cache_dir())


def read_spec(path: Path, dtype: str, page_size: int) -> ModelSpec:
    """The sizes of a checkpoint's model; `auto` is the dtype that its weights are kept in."""
    ServeConfig(model=path, dtype=dtype, page_size=page_size)  # checks the three
    try:
        keys = json.loads((path / "config.json").read_text())
    except ValueError as error:
        raise CheckpointError(f"{path / 'config.json'}: {error}") from error
    text = keys.get("text_config", keys)
    stored = text.get("dtype") or text.get("torch_dtype") or keys.get("dtype") or keys.get("torch_dtype") or "bfloat16"
    return ModelSpec.from_config(keys, stored if dtype == "auto" else dtype, page_size)


def cost_table(spec: ModelSpec) -> Table:
    recurrent = len(spec.mixers) - len(spec.attention_layers)
    layers = f"{len(spec.attention_layers)} attention, {recurrent} recurrent"
    table = Table(title=f"{spec.model_type}, {spec.dtype_name}: {layers} layers", title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("bytes", justify="right")
    table.add_column("as much as", justify="right")
    table.add_row("weights", f"{spec.parameter_bytes:,}", "")
    table.add_row("KV of a token", f"{spec.kv_bytes_per_token:,}", "")
    table.add_row(f"a page ({spec.page_size} tokens)", f"{spec.page_bytes:,}", "")
    in_tokens = f"{spec.checkpoint_bytes / spec.kv_bytes_per_token:,.0f} tokens of KV" if spec.attention_layers else ""
    pages = f"{spec.checkpoint_pages:,} pages"
    table.add_row("a checkpoint", f"{spec.checkpoint_bytes:,}", f"{in_tokens}; {pages}" if in_tokens else pages)
    return table


def flops_table(spec: ModelSpec) -> Table:
    """FLOPs of one more token after so many, and of the prefill that a hit of that length saves."""
    table = Table(title="FLOPs", title_justify="left")
    for name in ("after tokens", "one more token", "of that attention", "saved by a hit"):
        table.add_column(name, justify="right")
    for length in (n for n in INSPECTED_LENGTHS if n < spec.max_length):
        kinds = spec.flops_by_kind(length, length + 1)
        total = sum(kinds.values()) - kinds["head"]
        saved = spec.prefill_flops(0, length) - spec.flops_by_kind(0, length)["head"]
        share = f"{kinds.get('attention', 0) / total:.0%}"
        table.add_row(f"{length:,}", f"{total / 1e6:,.1f} M", share, f"{saved / 1e9:,.2f} G")
    return table
