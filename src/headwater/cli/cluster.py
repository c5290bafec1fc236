"""`headwater cluster`: several workers on a Ray cluster, and the router in front of them."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from headwater.cli.cluster_upgrade import UPGRADABLE, check_roles, given_values, seen_of, steps, upgraded
from headwater.cli.common import commands, show
from headwater.cli.extras import require
from headwater.cli.models import whole_folder
from headwater.cli.serve import EPILOG, GroupedCommand, announce, make_server, say, start_logging, with_options
from headwater.cli.settings import effective
from headwater.cluster.cost import Role
from headwater.cluster.upgrade import Upgrade
from headwater.config import SETTINGS, ServeConfig
from headwater.errors import ConfigError, HeadwaterError
from headwater.lab.cluster.rivals import CHOICES
from headwater.machine import usable_cores
from headwater.setting import SettingError
from headwater.table import Table

if TYPE_CHECKING:
    from headwater.cluster.encryption import RouterKeys
    from headwater.cluster.ray_workers import RayWorkers

log = logging.getLogger("headwater.cluster")

POLL_SECONDS = 0.5  # seconds between looks at the mailbox
MEMBERS_SECONDS = 30.0  # seconds until the router knows all workers that have loaded

group = typer.Typer(rich_markup_mode=None, help="Serve with several workers on a Ray cluster.")
commands.add_typer(group, name="cluster")

Address = Annotated[str | None, Option(help="Address of a Ray cluster, or auto. [default: one on this machine]")]
ConfigFile = Annotated[
    Path | None, Option(metavar="PATH", envvar="HEADWATER_CONFIG", show_envvar=False, help="TOML file with settings.")
]
Found = Annotated[str | None, Option(help="Address of a Ray cluster. [default: the one on this machine]")]


def up(
    workers: Annotated[int, Option(min=1, help="Workers; those of a host share --memory and the cores.")] = 2,
    prefill: Annotated[int, Option(min=0, help="Workers that only prefill, instead of --workers.")] = 0,
    decode: Annotated[int, Option(min=0, help="Workers that decode, and prefill short prompts.")] = 0,
    address: Address = None,
    routers: Annotated[int, Option(min=1, help="Routers, each a process; all serve on one port.")] = 1,
    rule: Annotated[str, Option(help=f"Choice of a request's worker: {', '.join(CHOICES)}.")] = "least_cost",
    share_weights: Annotated[bool, Option(help="Hold the weights once a host, and not in each worker.")] = True,
    config: ConfigFile = None,
    **flags: Any,
) -> None:
    """Start workers and serve in front of them until a signal comes."""
    if rule not in CHOICES:
        raise ConfigError(f"rule is {rule!r}, must be one of {', '.join(CHOICES)}")
    settings = effective(flags, os.environ, config).config
    roles = roles_of(settings, workers, prefill, decode)
    start_logging(settings)
    serve_until_stopped(settings, roles, routers, address, rule, share_weights)


def roles_of(config: ServeConfig, workers: int, prefill: int, decode: int) -> dict[Role, int]:
    """Return the number of workers of each role. Raises ConfigError if none can prefill for another."""
    if not (prefill or decode):
        return {Role.BOTH: workers}
    if not (prefill and decode):
        raise ConfigError(f"prefill is {prefill} and decode is {decode}: both must be given, or neither")
    roles = {Role.PREFILL: prefill, Role.DECODE: decode}
    check_roles(config, roles)
    return roles


group.command(cls=GroupedCommand, epilog=EPILOG)(with_options(up, SETTINGS))


@group.command()
def status(address: Found = None) -> None:
    """Print the workers, and the outcomes of requests."""
    state = _state(_mailbox(address))
    workers = Table("workers", ("name", "state", "fingerprint"), ("process", "answered", "running", "waiting"))
    for one in state["workers"]:
        numbers = (f"{one[name]:,}" for name in ("answered", "running", "waiting"))
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
    requests = Table("requests", ("outcome",), ("number",))
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
        raise ConfigError(f"no worker is named {worker!r}; the workers are {', '.join(names)}")
    _command(mailbox, "drain", worker)


@group.command()
def scale(
    workers: Annotated[int, Argument(min=1, help="Number of workers.")],
    role: Annotated[Role, Option(help="Role of these workers.")] = Role.BOTH,
    address: Found = None,
) -> None:
    """Change the number of workers."""
    mailbox = _mailbox(address)
    roles = _state(mailbox)["roles"]
    if role not in roles:
        raise ConfigError(f"no worker has role {role.value}; there are workers of {' and '.join(sorted(roles))}")
    _command(mailbox, "scale", str(workers), role.value)


def upgrade(
    address: Found = None,
    drain_first: Annotated[
        bool, Option("--drain-first", help="Drain each worker before the next one starts: without room for one more.")
    ] = False,
    config: ConfigFile = None,
    **flags: Any,
) -> None:
    """Replace every worker, one after the other.

    Settings that are not given stay as they are.
    """
    values = given_values(flags, os.environ, config)
    mailbox = _mailbox(address)
    if "model" in values:
        whole_folder(values["model"])
    number = uuid.uuid4().hex
    _command(mailbox, "upgrade", number, values, drain_first)
    for line in steps(lambda: _state_of(mailbox), number):
        say(line)


group.command(cls=GroupedCommand, epilog=EPILOG)(with_options(upgrade, UPGRADABLE))


@group.command()
def down(address: Found = None) -> None:
    """End a cluster, once its requests have ended."""
    _command(_mailbox(address), "down")


def _mailbox(address: str | None) -> Any:
    return _ray_modules()[0].mailbox_at(address)


def _state(mailbox: Any) -> dict[str, Any]:
    state = _state_of(mailbox)
    if not state:
        raise ConfigError("the cluster is still starting")
    return state


def _state_of(mailbox: Any) -> dict[str, Any]:
    """Return the cluster's reported state; nothing while it starts, or after its mailbox was restarted."""
    import ray

    try:
        state: dict[str, Any] = ray.get(mailbox.state.remote())
    except ray.exceptions.RayError as error:
        raise ConfigError("the cluster has ended, or Ray does not reach it") from error
    return state


def _command(mailbox: Any, *command: object) -> None:
    import ray

    ray.get(mailbox.post.remote(command))


def _ray_modules() -> tuple[Any, Any]:
    """Return the modules that need Ray: of its cluster, and of workers."""
    from headwater.cluster import ray_cluster, ray_workers

    return ray_cluster, ray_workers


def check_fits_workers(config: ServeConfig) -> None:
    """Raise SettingError for what `headwater serve` offers and the workers of a cluster do not."""
    reasons = {
        "more_models": "but the workers of a cluster serve one model",
        "unload_after": "but the workers of a cluster keep their weights",
        "kv_events": "but the workers of a cluster publish to their router only",
    }
    for one in SETTINGS:
        value = getattr(config, one.name)
        if one.name in reasons and value not in (None, False, ()):
            raise SettingError(one.name, one.show(value), reasons[one.name])


def serve_until_stopped(
    config: ServeConfig, roles: dict[Role, int], routers: int, address: str | None, rule: str, share_weights: bool
) -> None:
    """Bind, start the workers, serve, and stop in order. Raises KeyboardInterrupt after a second SIGINT."""
    check_fits_workers(config)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # without requests there is nothing to drain
    require("cluster", "serve")
    announce(config)
    ray_cluster, ray_workers = _ray_modules()
    from headwater.cluster.encryption import RouterKeys
    from headwater.server.http.process import listener, url
    from headwater.server.http.tls import check_tls
    from headwater.server.observe.logs import configure_logging

    check_tls(config)
    keys = RouterKeys.new()
    with listener(config) as sock:
        whole_folder(config.model)
        configure_logging(config.log_format, config.log_level)
        cores = usable_cores()
        router = OneRouter(config, keys, rule) if routers == 1 else SeveralRouters(config, keys, rule, routers, sock)
        found = ray_cluster.connect(address, cores)
        hosts = [cores] if address is None else ray_cluster.hosts() or [cores]
        mailbox = ray_cluster.OwnMailbox()
        workers = sum(roles.values())
        started = (config, roles, router.members, keys.for_workers, address, hosts, share_weights)
        running: RayWorkers = ray_workers.RayWorkers(*started)
        router.members.lost, running.upgraded = running.lost, router.upgraded
        ended = threading.Event()
        try:
            router.start()
            running.start()
            say(f"{workers} workers start on Ray at {found}, with {running.shares}")
            if not (running.wait(ray_workers.JOIN_SECONDS) and router.members.wait_for(workers, MEMBERS_SECONDS)):
                raise ConfigError(f"the workers were not ready after {ray_workers.JOIN_SECONDS:g} s")
            sock.listen()
            health = router.members.health()
            _announce(health, url(sock, config), routers)
            commands = Commands(mailbox, router.members, running, str(health["model"]))
            headless = _started_threads(commands, found, ended, ray_cluster.wait_for_loss)
            interrupted = router.serve(sock)
            if headless.is_set():
                raise ConfigError("Ray's head has ended, and with it the cluster")
        finally:
            ended.set()
            router.stop()
            running.close()
            ray_cluster.disconnect()
        if interrupted:
            raise KeyboardInterrupt


def _announce(health: Mapping[str, Any], url: str, routers: int) -> None:
    by = "" if routers == 1 else f", by {routers} routers"
    say(f"Headwater {version('headwater')} serves {health['model']} on {url}{by}")
    say(f"Deterministic: {health.get('deterministic')}")


def _started_threads(
    commands: Commands, address: str, ended: threading.Event, wait_for_loss: Callable[..., bool]
) -> threading.Event:
    """Start to run commands and to watch Ray's head; return the event that a lost head sets."""
    headless = threading.Event()
    threading.Thread(target=commands.follow, args=(ended,), name="headwater-commands", daemon=True).start()
    watched = address, ended, headless, wait_for_loss
    threading.Thread(target=_end_without_head, args=watched, name="headwater-head", daemon=True).start()
    return headless


def _end_without_head(
    address: str, ended: threading.Event, headless: threading.Event, wait_for_loss: Callable[..., bool]
) -> None:
    """End the cluster as a signal does, if Ray's head is lost: requests still end, and new ones are refused."""
    if wait_for_loss(address, ended):
        headless.set()
        os.kill(os.getpid(), signal.SIGTERM)


class OneRouter:
    """The router, in this process."""

    def __init__(self, config: ServeConfig, keys: RouterKeys, rule: str) -> None:
        from headwater.cli.router_process import router_of

        self._config = config
        self.members = router_of(config, keys, rule)
        self.start, self.stop = self.members.start, self.members.stop

    def upgraded(self, config: ServeConfig) -> None:
        """Do nothing: an upgrade changes nothing of the model that the router holds."""

    def serve(self, sock: socket.socket) -> bool:
        """Serve until a signal comes; return whether a second SIGINT has come."""
        from headwater.cli.router_process import app_of

        server = make_server(app_of(self.members, self._config), self.members, self._config)
        server.run(sockets=[sock])
        return server.interrupted


class SeveralRouters:
    """Several routers, each in a process of its own; this one waits for a signal."""

    def __init__(self, config: ServeConfig, keys: RouterKeys, rule: str, routers: int, sock: socket.socket) -> None:
        from headwater.cli.router_process import run_router
        from headwater.cluster.router_processes import RouterProcesses

        self._seconds = config.drain
        self._renews = config.api_key_file is not None or config.tls_cert is not None
        self.members = RouterProcesses(run_router, routers, sock, config, keys, rule)
        self.start = self.members.start

    def upgraded(self, config: ServeConfig) -> None:
        """Start the next router with these settings: the folder of the earlier model may be gone."""
        self.members.config = config

    def serve(self, sock: socket.socket) -> bool:
        """Wait for a signal while the routers serve; return whether a second SIGINT has come."""
        came = list[int]()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: came.append(number))
        if self._renews:
            signal.signal(signal.SIGHUP, lambda number, frame: self.members.renew())
        while not came:
            time.sleep(POLL_SECONDS / 5)
        came.clear()
        self.members.stop(self._seconds)
        return signal.SIGINT in came

    def stop(self) -> None:
        self.members.stop(0.0)


class Commands:
    """Commands that come by the mailbox."""

    def __init__(self, mailbox: Any, router: Any, running: RayWorkers, model_name: str) -> None:
        self._mailbox, self._router, self._running, self._name = mailbox, router, running, model_name
        self._seen = seen_of(running.config)  # of the model, as routers and clients see it; its folder may change later
        self._refused: dict[str, str] = {}  # upgrades, and why each was not begun

    def follow(self, ended: threading.Event) -> None:
        """Run commands, and keep the state that other processes see up to date, until the cluster ends."""
        while not ended.wait(POLL_SECONDS):
            for command, *values in self._mailbox.exchange(self._state()):
                try:
                    self._run(command, values)
                except Exception:  # others must still be heard
                    log.exception("the command %s failed", command)

    def _run(self, command: str, values: list[Any]) -> None:
        if command == "drain":
            self._running.drain(*values)
        elif command == "scale":
            wanted, role = values
            self._running.scale(int(wanted), Role(role))
        elif command == "upgrade":
            self._upgrade(*values)
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def _state(self) -> dict[str, Any]:
        upgrade = self._running.upgrade
        return {
            **self._router.state(),
            "roles": list(self._running.wanted),
            "upgrade": upgrade and upgrade.shown(),
            "refused": self._refused,
        }

    def _upgrade(self, number: str, values: dict[str, Any], drain_first: bool) -> None:
        running = self._running
        try:
            config = upgraded(running.config, values, self._seen, self._name, running.wanted)
            running.begin(Upgrade(number, config, drain_first))
        except (HeadwaterError, OSError) as error:
            self._refused[number] = str(error)
        except Exception as error:
            self._refused[number] = repr(error)
            raise
