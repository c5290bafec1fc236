"""The process of one router of several: it accepts from a socket that it shares with the others."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from fastapi import FastAPI
from prometheus_client.core import CounterMetricFamily, Metric

from headwater.cli.serve import make_server
from headwater.cluster.encryption import CurveClient, RouterKeys
from headwater.cluster.router import RoutedModel, Router
from headwater.cluster.router_processes import Given
from headwater.config import ServeConfig
from headwater.hub_name import name_of
from headwater.lab.cluster.rivals import CHOICES
from headwater.models.hub import folder_of
from headwater.models.load import read_spec, read_texts
from headwater.server.app import create_app
from headwater.server.http.process import ListeningSocket
from headwater.server.observe.logs import configure_logging

STATE_SECONDS = 0.1  # seconds between states
FIRST_WORKER_SECONDS = 600.0  # seconds to wait for a worker before connections are accepted


def routed_model(config: ServeConfig) -> RoutedModel:
    """Read the parts of the model that a router needs: no weights."""
    path = folder_of(config.model)
    spec = read_spec(path, config.dtype, config.device, config.page_size, config.weights, config.rope_scaling)
    texts = read_texts(path)
    name = config.model_name or name_of(path)
    return RoutedModel(name, texts.tokenizer, texts.chat_template, texts.special_tokens, texts.generation, spec)


def router_of(config: ServeConfig, keys: RouterKeys, rule: str) -> Router:
    """Return a router of a cluster with these keys."""
    return Router(routed_model(config), keys.digests, CHOICES[rule](), client=CurveClient(keys.pair))


class RequestsCollector:
    """Collector of the outcomes of a router's requests, and of its predictions."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def describe(self) -> list[Metric]:
        """Return nothing: outcomes are named when they are first seen."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield one family; a label is an outcome as /health names it."""
        text = "Requests of this router, by outcome; one may count in several"
        found = CounterMetricFamily("headwater_routed_requests", text, labels=["outcome"])
        for outcome, number in sorted(dict(self._router.counts).items()):
            found.add_metric([outcome], number)
        yield found


def app_of(router: Router, config: ServeConfig) -> FastAPI:
    """Return a server's app over a router; /metrics has its requests, too."""
    app = create_app(router, config)
    app.state.registry.register(RequestsCollector(router))
    return app


def run_router(given: Given, pipe: Connection) -> None:
    """Route until a signal comes, or the other end of the pipe is closed."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the server runs: it reads keys and certificate when it starts
    config = given.config
    configure_logging(config.log_format, config.log_level)
    router = router_of(config, given.keys, given.rule)
    sending = threading.Lock()

    def send(kind: str, what: Any) -> None:
        with sending, suppress(OSError):
            pipe.send((kind, what))

    router.lost = lambda name: send("lost", name)
    router.start()
    ended = threading.Event()

    def listen() -> None:
        commands: dict[str, Callable[..., None]] = {"join": router.join, "drain": router.drain, "leave": router.leave}
        with suppress(EOFError, OSError):
            while True:
                name, *values = pipe.recv()
                commands[name](*values)
        if not ended.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    def tell() -> None:
        while not ended.wait(STATE_SECONDS):
            send("health", router.health())

    for work in (listen, tell):
        threading.Thread(target=work, name=f"headwater-{work.__name__}", daemon=True).start()
    try:
        router.wait_for(1, FIRST_WORKER_SECONDS)
        app = app_of(router, config)
        server = make_server(app, router, config)
        server.run(sockets=[ListeningSocket(given.family, socket.SOCK_STREAM, fileno=given.listening)])
    finally:
        ended.set()
        router.stop()
