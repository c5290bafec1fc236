"""`headwater deploy`: files of the package for systemd, Docker, Grafana and Prometheus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

import headwater
from headwater.cache_folder import write_whole
from headwater.cli.common import commands, one_of, show
from headwater.errors import ConfigError

FOLDER = Path(headwater.__file__).parent / "assets" / "deploy"
FILES = {  # by kind; the first one is printed, the others are those that it names
    "systemd": ("headwater.service",),
    "docker": ("Dockerfile",),
    "compose": ("compose.yml", "Dockerfile", "prometheus-alerts.yml", "grafana-dashboard.json"),
    "grafana": ("grafana-dashboard.json",),
    "alerts": ("prometheus-alerts.yml",),
}


@commands.command()
def deploy(
    kind: Annotated[str, typer.Argument(help=f"{', '.join(FILES)}.")],
    out: Annotated[Path | None, Option(help="Write the file, and those that it names, to this folder.")] = None,
) -> None:
    """Print a file for systemd, Docker, Grafana or Prometheus.

    Each begins with how to use it, but the dashboard, which Grafana imports.
    """
    names = FILES[one_of("kind", kind, FILES)]
    if out is None:
        print((FOLDER / names[0]).read_text(encoding="utf-8"), end="")
        return
    existing = [name for name in names if (out / name).exists()]
    if existing:
        raise ConfigError(f"{out / existing[0]} exists, and nothing was written")
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        write_whole(out / name, [(FOLDER / name).read_text(encoding="utf-8")])
        show(f"written: {out / name}")
