"""`headwater serve`: settings, a listening server, and its orderly end."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand

from headwater.cli.common import commands, progress_console
from headwater.cli.extras import require
from headwater.cli.models import config_folder, named, whole_folder
from headwater.cli.settings import as_toml, effective, misspelt
from headwater.config import SETTINGS, ServeConfig
from headwater.hub_name import name_of
from headwater.machine import cpu_quota, in_units, quota_threads
from headwater.models.dtype import choose_dtype
from headwater.models.families import read_folder
from headwater.models.files import model_config
from headwater.setting import FILE, SWITCH, TIERS, Setting, SettingError
from headwater.spec import WEIGHTS, ModelSpec

if TYPE_CHECKING:
    from fastapi import FastAPI
    from rich.status import Status

    from headwater.engine.engine import Engine
    from headwater.server.http.process import DrainedEngine, DrainingServer
    from headwater.server.http.service_manager import ServiceManager

EPILOG = (
    "Every setting is also a variable of the environment (HEADWATER_MAX_RUNNING=32), and a line of the file of "
    "--config (max_running = 32). Flags override the environment, which overrides the file."
)

MIN_SAVED = 0.05  # of weights' bytes, for a line of the start
MIN_HELD_PROMPTS, MIN_HELD_TOKENS = 4, 2_048  # that the memory should hold
LINE_SECONDS = 5  # between lines of progress without a terminal

start_log = logging.getLogger("headwater.start")  # lines of the start, enabled if logs are JSON objects
start_log.disabled = True


class GroupedCommand(TyperCommand):
    """A command whose help lists its options in groups, as plain text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is not None:
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or "Other", []).append(row)
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


def serve(
    config: Annotated[
        Path | None,
        Option(metavar="PATH", envvar="HEADWATER_CONFIG", show_envvar=False, help="TOML file with settings."),
    ] = None,
    print_config: Annotated[
        bool, Option("--print-config", help="Print the settings and the source of each, then exit.")
    ] = False,
    **flags: Any,
) -> None:
    """Serve a checkpoint behind an OpenAI-compatible API."""
    settings = effective(flags, os.environ, config)
    if print_config:
        warn_of_misspelt()
        print(as_toml(settings), end="")
        return
    start_logging(settings.config)
    warn_of_misspelt()
    try:
        serve_until_stopped(settings.config)
    except SettingError as error:  # of the machine: its devices, its memory, its ports
        raise error.at(settings.origins.get(error.name, "")) from error


def with_options(command: Any, settings: tuple[Setting, ...]) -> Any:
    """Replace a command's `**flags` by one parameter for each setting."""
    written = inspect.signature(command, eval_str=True).parameters.values()
    own = [one.replace(kind=one.KEYWORD_ONLY) for one in written if one.kind is not one.VAR_KEYWORD]
    parameters = [*map(_parameter, settings), *own]
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _parameter(one: Setting) -> inspect.Parameter:
    """Return the parameter of a setting: None if it is not given, otherwise a text that the setting parses."""
    facts = [", ".join(one.choices)] if one.choices else []
    default = one.unset if one.default is None else one.show(one.default) or "none"
    shared: dict[str, Any] = {
        "help": f"{one.help} [{'; '.join([*facts, f'default: {default}'])}]",
        "show_default": False,
        "rich_help_panel": one.group,
        "metavar": one.kind.metavar or None,
    }
    if one.choices:
        shared["autocompletion"] = lambda: list(one.choices)
    is_list = one.kind is TIERS or one.name == "more_models"
    kind: Any = bool if one.kind is SWITCH else Path if one.kind is FILE else list[str] if is_list else str
    if one.name in ("model", "more_models"):
        info = typer.Argument(**{**shared, "metavar": "MODEL"})
    elif one.kind is SWITCH:
        info = Option(f"{one.flag}/--no-{one.flag[2:]}", **shared)
    else:
        info = Option(one.flag, **shared)
    annotation = Annotated[kind | None, info]
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


commands.command(cls=GroupedCommand, epilog=EPILOG)(with_options(serve, SETTINGS))


def serve_until_stopped(config: ServeConfig) -> None:
    """Bind, so that an occupied port is an error before a model is downloaded; then load, serve, and stop in order.

    Raises KeyboardInterrupt if a second SIGINT ends the draining early.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # without requests there is nothing to drain
    require("serve")
    for one in (configs := of_models(config)):
        announce(one)
    # imports of the web framework and of torch, without which `--help` and `inspect` start faster
    from headwater.server.http.process import listener, url
    from headwater.server.http.service_manager import ServiceManager
    from headwater.server.http.tls import check_tls
    from headwater.server.observe.logs import configure_logging
    from headwater.server.observe.tracing import otlp_exporter

    manager = ServiceManager()
    manager.status(f"loading {config.model or 'headwater-tiny'}")
    check_tls(config)
    if config.otlp_endpoint is not None:
        otlp_exporter(config.otlp_endpoint)  # is created again later: now only to know that its packages are there
    with listener(config) as sock, kv_events(config) as publish:
        check_models(configs)
        from headwater.engine.engines import Engines
        from headwater.server.app import create_app
        from headwater.server.warm_up import warm_up

        configure_logging(config.log_format, config.log_level)
        engines = Engines([load_engine(one, manager.status) for one in configs])
        pairs = list(zip(engines.all, configs, strict=True))
        for pair in pairs if config.warm_up else ():
            manager.status("warming up")
            warm_up(*pair)
        server = make_server(create_app(*pairs[0], *pairs[1:]), engines, config, manager)
        sock.listen()  # before the line that announces the URL
        serves = f"serves {' and '.join(one.model_name for one in engines.all)} on {url(sock, config)}"
        say(f"Headwater {version('headwater')} {serves}")
        if config.uds is None:
            page = url(sock, config).removesuffix("v1")
            say(f"Live page: {page}, chat: {page}chat")
        publish(engines.all[0])
        say_proven(engines.all)
        engines.start()
        manager.ready(engines.turn_seconds, serves)
        try:
            server.run(sockets=[sock])
        finally:
            engines.stop()
        if server.interrupted:
            raise KeyboardInterrupt


def of_models(config: ServeConfig) -> list[ServeConfig]:
    """Return the settings of each model, with an equal share of the memory, which follows use where pages can move."""
    models = [config.model, *(named(Path(name)) for name in config.more_models)]
    share, moves = (
        config.memory // len(models),
        config.device == "cpu" and config.speculation in ("off", "ngram", "suffix"),
    )
    most = config.memory - (len(models) - 1) * (share // 2) if moves and len(models) > 1 else 0
    return [replace(config, model=model, more_models=(), memory=share, max_memory=most) for model in models]


def check_models(configs: list[ServeConfig]) -> None:
    """Raise TemplateError for a broken chat template, SettingError for two models of one name, before the proofs."""
    folders = [whole_folder(one.model) for one in configs]
    for folder in folders:
        check_template(folder)
    names = [name_of(folder) for folder in folders]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise SettingError("more_models", ", ".join(names[1:]), f"but two models have the name {min(twice)!r}")


def say_proven(engines: Sequence[Engine]) -> None:
    """Report, for each model if there are several, whether hits are proven exact."""
    for engine in engines:
        of, proven = f" ({engine.model_name})" if len(engines) > 1 else "", engine.check.proven
        when = f", proven {proven:%F %R} UTC" if proven else ""
        say(f"Deterministic: {engine.health()['deterministic']}{when}{of}")


def start_logging(config: ServeConfig) -> None:
    """Let `say` log instead of print if logs are JSON objects, so that all lines are in one stream."""
    if config.log_format == "json":
        from headwater.server.observe.logs import configure_logging

        configure_logging(config.log_format, config.log_level)
        start_log.disabled, progress_console.quiet = False, True


def warn_of_misspelt() -> None:
    """Warn of variables of the environment that look like settings."""
    for line in misspelt(os.environ):
        if start_log.disabled:
            print(f"headwater: warning: {line}", file=sys.stderr)
        else:
            start_log.warning("%s", line)


def say(line: str) -> None:
    """Report a line of the start: print it, or log it after `start_logging` for JSON."""
    if start_log.disabled:
        print(line, flush=True)
    else:
        start_log.info("%s", line)


def announce(config: ServeConfig) -> None:
    """Print the model to be loaded and the reason for its data type, before the imports that take seconds.

    For a hub's model that is not in the cache, config.json is downloaded. Raises DownloadError or CheckpointError.
    """
    what = f"loading {config.model}"
    if config.model is None:
        what = "no model given, loading headwater-tiny: small, short answers"
    say(f"Headwater {version('headwater')}: {what}")
    folder = config_folder(config.model)
    dtype = choose_dtype(model_config(folder), config.dtype, config.device)
    say(f"Computing in {dtype.name}: {dtype.reason}")
    spec = read_folder(folder, dtype.name, config.page_size, config.weights)
    quota = quota_threads()
    if quota is not None and config.threads is None and config.device == "cpu":
        say(f"Computing on {quota} threads: the processes of this control group may use {cpu_quota():g} cores")
    for line in (*weight_lines(spec, config), *memory_lines(spec, config)):
        say(line)


def memory_lines(spec: ModelSpec, config: ServeConfig) -> list[str]:
    """Return a warning if the memory holds less than a few checkpoints and prompts of MIN_HELD_TOKENS."""
    needed = MIN_HELD_PROMPTS * (spec.checkpoint_bytes + MIN_HELD_TOKENS * spec.kv_bytes_per_token)
    if config.memory >= needed or not config.cache:
        return []
    few = f"{MIN_HELD_PROMPTS} prompts of {MIN_HELD_TOKENS:,} tokens with a checkpoint each"
    return [f"Warning: memory is {in_units(config.memory)}, little is cached:", f"{few} take {in_units(needed)}"]


def weight_lines(spec: ModelSpec, config: ServeConfig) -> list[str]:
    """Return how weights are held, and what fewer bits would save; a card holds values of integers and float8."""
    stored = replace(spec, weights="auto").weight_bytes
    if spec.weights != "auto":
        sizes = f"{in_units(spec.weight_bytes)}, as stored {in_units(stored)}"
        return [f"Weights are held in {spec.weights}, as --weights says: {sizes}"]
    held = f"Weights are held in {spec.weights_held}, as stored"
    if config.device != "cpu":
        return [held]
    saved = {name: stored - replace(spec, weights=name).weight_bytes for name in WEIGHTS[1:]}
    worthwhile = (f"{name} {in_units(n)} ({n / stored:.0%})" for name, n in saved.items() if n > MIN_SAVED * stored)
    fewer = ", ".join(worthwhile)
    return [f"{held}: {in_units(stored)}", *[f"--weights would save: {fewer}"] * bool(fewer)]


def check_template(folder: Path) -> None:
    """Raise TemplateError for a chat template that does not compile, before weights are read and kernels proven."""
    from headwater.models.load import read_texts
    from headwater.server.prompt.template import ChatTemplate

    texts = read_texts(folder)
    if texts.chat_template is not None:
        ChatTemplate(texts.chat_template, texts.special_tokens)


class Proving:
    """Progress of the self-check: a status line on a terminal, otherwise a line every LINE_SECONDS.

    `report` is called with each.
    """

    def __init__(self, status: Status, report: Callable[[str], None]) -> None:
        self._status, self._report = status, report
        self._next: float | None = None  # time of the next line; None: nothing is proven now

    def __call__(self, done: int, total: int) -> None:
        line = f"{done} of {total} checks done"
        if self._next is None:
            say("Proving that a hit changes no bit on this machine")
            self._next = time.monotonic() + LINE_SECONDS
            self._status.start()
        elif done == total:
            self._status.stop()
        elif time.monotonic() >= self._next and not progress_console.is_terminal:
            say(line)
            self._next += LINE_SECONDS
        self._status.update(line)
        self._report(f"proving that a hit changes no bit: {line}")


def load_engine(config: ServeConfig, report: Callable[[str], None] = lambda text: None) -> Engine:
    """Load the model into an engine, with Marconi's tuner as its observer if the eviction policy has one."""
    from headwater.engine.engine import Engine
    from headwater.schedule.tuner import server_tuning

    status = progress_console.status("")
    try:
        engine = Engine.load(config, Proving(status, report))
    finally:
        status.stop()
    tuning = server_tuning(engine.scheduler)
    if tuning is not None:
        engine.answering.observer = tuning
    return engine


@contextmanager
def kv_events(config: ServeConfig) -> Iterator[Callable[[Engine], None]]:
    """Bind the sockets of KV events, if they are on; yield a function that publishes those of an engine.

    Raises SettingError if they cannot be bound.
    """
    if not config.kv_events:
        yield lambda engine: None
        return
    from headwater.cluster.publisher import Publishing

    def publish(engine: Engine) -> None:
        engine.stepped = publishing.start(engine.scheduler.cache, engine.own_tiers)
        say("KV events: {} (live), {} (replays and snapshots)".format(*publishing.addresses))

    publishing = Publishing(config)
    try:
        yield publish
    finally:
        publishing.close()


def make_server(
    app: FastAPI, engine: DrainedEngine, config: ServeConfig, manager: ServiceManager | None = None
) -> DrainingServer:
    """Return a server of an app, which drains as the settings say."""
    from headwater.server.http.process import DrainingServer, protocol_settings

    state = app.state
    return DrainingServer(
        protocol_settings(app, config), state.in_flight, engine, config.drain, manager, state.renewals
    )
