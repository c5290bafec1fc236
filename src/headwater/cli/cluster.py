"""`headwater cluster`: several workers on a Ray cluster, and the router in front of them."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from headwater.cli.common import commands, show
from headwater.cli.download import whole_folder
from headwater.cli.serve import EPILOG, GroupedCommand, announce, make_server, say, with_options
from headwater.cli.settings import effective
from headwater.cluster.choice import Role
from headwater.cluster.rivals import CHOICES
from headwater.config import SETTINGS, ServeConfig
from headwater.errors import ConfigError
from headwater.machine import usable_cores
from headwater.setting import SettingError
from headwater.table import Table

if TYPE_CHECKING:
    from headwater.cluster.curve import RouterKeys
    from headwater.cluster.ray_workers import RayWorkers

POLLED = 0.5  # seconds between looks at the mailbox
JOINING, KNOWN = 600.0, 30.0  # seconds for all workers to load, and then to be known to the router

group = typer.Typer(rich_markup_mode=None, help="Serve with several workers on a Ray cluster.")
commands.add_typer(group, name="cluster")

Address = Annotated[str | None, Option(help="Address of a Ray cluster, or auto. [default: one on this machine]")]
Found = Annotated[str | None, Option(help="Address of a Ray cluster. [default: the one on this machine]")]


def up(
    workers: Annotated[int, Option(min=1, help="Workers, which share --memory and the cores.")] = 2,
    prefill: Annotated[int, Option(min=0, help="Workers that only prefill, in place of --workers.")] = 0,
    decode: Annotated[int, Option(min=0, help="Workers that decode, and prefill short prompts.")] = 0,
    address: Address = None,
    routers: Annotated[int, Option(min=1, help="Routers, each a process; all serve on one port.")] = 1,
    rule: Annotated[str, Option(help=f"Choice of a request's worker: {', '.join(CHOICES)}.")] = "least_cost",
    share_weights: Annotated[bool, Option(help="Hold the weights once a host, and not in each worker.")] = True,
    config: Annotated[
        Path | None,
        Option(metavar="PATH", envvar="HEADWATER_CONFIG", show_envvar=False, help="TOML file with settings."),
    ] = None,
    **flags: Any,
) -> None:
    """Start workers and serve in front of them until a signal comes."""
    if rule not in CHOICES:
        raise ConfigError(f"rule is {rule!r}, must be one of {', '.join(CHOICES)}")
    settings = effective(flags, os.environ, config).config
    roles = roles_of(settings, workers, prefill, decode)
    serve_until_stopped(settings, roles, routers, address, rule, share_weights)


def roles_of(config: ServeConfig, workers: int, prefill: int, decode: int) -> dict[Role, int]:
    """Return the number of workers of each role. Raises ConfigError if none can prefill for another."""
    if not (prefill or decode):
        return {Role.BOTH: workers}
    if not (prefill and decode):
        raise ConfigError(f"prefill is {prefill} and decode is {decode}: both must be given, or neither")
    from headwater.cluster.hosting import pulls  # needs the web framework

    if not pulls(config):
        must = "workers pull prefixes with a cache, and not with decode_reuse raw"
        raise ConfigError(f"prefill is {prefill}, must be 0 with these settings: {must}")
    return {Role.PREFILL: prefill, Role.DECODE: decode}


group.command(cls=GroupedCommand, epilog=EPILOG)(with_options(up, SETTINGS))


@group.command()
def status(address: Found = None) -> None:
    """Print the workers, and what became of requests."""
    state = _state(_mailbox(address))
    workers = Table("workers", ("name", "state", "fingerprint"), ("process", "requests", "running", "waiting"))
    for one in state["workers"]:
        numbers = (f"{one[name]:,}" for name in ("requests", "running", "waiting"))
        workers.add_row(one["name"], one["state"], one["fingerprint"] or "", str(one["process"] or ""), *numbers)
    roles = Table("roles", ("role", "workers"), ())
    for role in (Role.PREFILL, Role.DECODE):
        if named := [one["name"] for one in state["workers"] if one["role"] == role]:
            roles.add_row(role.value, ", ".join(named))
    pulls = Table("pulled", ("worker", "through"), ("bytes",))
    for one in state["workers"]:
        for way, size in one["pulled_bytes"].items():
            if size:
                pulls.add_row(one["name"], way, f"{size:,}")
    requests = Table("requests", ("what became of them",), ("number",))
    for what, number in sorted(state["requests"].items()):
        requests.add_row(what.replace("_", " "), f"{number:,}")
    routers = Table("routers", (), ("process",))
    for process in state.get("routers", ()):
        routers.add_row(str(process))
    show(
        workers,
        *(one for one in (roles, pulls) if one.row_count),
        requests,
        *([routers] if state.get("routers") else []),
    )


@group.command()
def drain(worker: Annotated[str, Argument(help="Name of a worker.")], address: Found = None) -> None:
    """Replace a worker, once its requests have ended."""
    mailbox = _mailbox(address)
    names = [one["name"] for one in _state(mailbox)["workers"]]
    if worker not in names:
        raise ConfigError(f"there is no worker {worker!r}, but {', '.join(names)}")
    _command(mailbox, "drain", worker)


@group.command()
def scale(
    workers: Annotated[int, Argument(min=1, help="Number of workers.")],
    role: Annotated[Role, Option(help="Role of these workers.")] = Role.BOTH,
    address: Found = None,
) -> None:
    """Have more workers, or fewer."""
    mailbox = _mailbox(address)
    roles = _state(mailbox)["roles"]
    if role not in roles:
        raise ConfigError(f"there are no workers of role {role.value}, but of {' and '.join(sorted(roles))}")
    _command(mailbox, "scale", str(workers), role.value)


@group.command()
def down(address: Found = None) -> None:
    """End a cluster, once its requests have ended."""
    _command(_mailbox(address), "down")


def _mailbox(address: str | None) -> Any:
    return _ray_workers().mailbox_at(address)


def _state(mailbox: Any) -> dict[str, Any]:
    import ray

    state: dict[str, Any] = ray.get(mailbox.state.remote())
    if not state:
        raise ConfigError("the cluster is still starting")
    return state


def _command(mailbox: Any, *command: str) -> None:
    import ray

    ray.get(mailbox.post.remote(command))


def _ray_workers() -> Any:
    """Return the module that needs Ray. Raises ConfigError if a package is missing."""
    try:
        from headwater.cluster import ray_workers
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'headwater[cluster]'") from error
    return ray_workers


def serve_until_stopped(
    config: ServeConfig, roles: dict[Role, int], routers: int, address: str | None, rule: str, share_weights: bool
) -> None:
    """Bind, start the workers, serve, and stop in order. Raises KeyboardInterrupt after a second SIGINT."""
    if config.kv_events:
        raise SettingError("kv_events", "on", "but the workers of a cluster publish to their router alone")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # without requests there is nothing to drain
    announce(config)
    ray_workers = _ray_workers()
    from headwater.cluster.curve import RouterKeys
    from headwater.server.http.process import check_tls, listener, url
    from headwater.server.observe.logs import configure_logging

    check_tls(config)
    keys = RouterKeys.new()
    with listener(config) as sock:
        whole_folder(config.model)
        configure_logging(config.log_format)
        cores = usable_cores()
        router = OneRouter(config, keys, rule) if routers == 1 else SeveralRouters(config, keys, rule, routers, sock)
        found = ray_workers.connect(address, cores)
        mailbox = ray_workers.OwnMailbox()
        workers = sum(roles.values())
        running: RayWorkers = ray_workers.RayWorkers(
            config, roles, router.members, keys.for_workers, address, cores, share_weights
        )
        router.members.lost = running.lost
        ended = threading.Event()
        try:
            router.start()
            running.start()
            say(f"{workers} workers start on Ray at {found}, with {running.shares}")
            if not (running.wait(JOINING) and router.members.wait_for(workers, KNOWN)):
                raise ConfigError(f"the workers were not there after {JOINING:g} s")
            sock.listen()
            health = router.members.health()
            by = "" if routers == 1 else f", by {routers} routers"
            say(f"Headwater {version('headwater')} serves {health['model']} on {url(sock, config)}{by}")
            say(f"Deterministic: {health.get('deterministic')}")
            follow = threading.Thread(
                target=_follow_commands, args=(mailbox, router.members, running, ended), daemon=True
            )
            follow.start()
            interrupted = router.serve(sock)
        finally:
            ended.set()
            router.stop()
            running.close()
            ray_workers.disconnect()
        if interrupted:
            raise KeyboardInterrupt


class OneRouter:
    """The router, in this process."""

    def __init__(self, config: ServeConfig, keys: RouterKeys, rule: str) -> None:
        from headwater.cli.router_process import router_of

        self._config = config
        self.members = router_of(config, keys, rule)
        self.start, self.stop = self.members.start, self.members.stop

    def serve(self, sock: socket.socket) -> bool:
        """Serve until a signal comes; return whether a second SIGINT has come."""
        from headwater.server.app import create_app

        server = make_server(create_app(self.members, self._config), self.members, self._config)
        server.run(sockets=[sock])
        return server.interrupted


class SeveralRouters:
    """Several routers, each in a process of its own; this one waits for a signal."""

    def __init__(self, config: ServeConfig, keys: RouterKeys, rule: str, routers: int, sock: socket.socket) -> None:
        from headwater.cli.router_process import run_router
        from headwater.cluster.router_processes import RouterProcesses

        self._seconds = config.drain
        self.members = RouterProcesses(run_router, routers, sock, config, keys, rule)
        self.start = self.members.start

    def serve(self, sock: socket.socket) -> bool:
        """Wait for a signal while the routers serve; return whether a second SIGINT has come."""
        came = list[int]()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: came.append(number))
        while not came:
            time.sleep(POLLED / 5)
        came.clear()
        self.members.stop(self._seconds)
        return signal.SIGINT in came

    def stop(self) -> None:
        self.members.stop(0.0)


def _follow_commands(mailbox: Any, router: Any, running: RayWorkers, ended: threading.Event) -> None:
    """Run the commands of the mailbox, and keep its state up to date."""
    while not ended.wait(POLLED):
        for command, *values in mailbox.exchange({**router.state(), "roles": list(running.wanted)}):
            if command == "drain":
                running.drain(*values)
            elif command == "scale":
                wanted, role = values
                running.scale(int(wanted), Role(role))
            else:
                os.kill(os.getpid(), signal.SIGTERM)
