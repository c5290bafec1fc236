"""`headwater serve`: from settings to a listening server, and back to an ordered end."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from headwater.cache.eviction import make_eviction
from headwater.cache.placement import make_placement
from headwater.cli.common import Dtype, Memory, Model, PageSize, commands
from headwater.config import DECODE_REUSE, DEVICES, POOLS, ServeConfig, parse_bytes
from headwater.errors import ConfigError

GRACE = 5  # seconds that open answers have to end when the server stops


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
