"""The command line, a file for each command or a few. A user's error is one line on standard error, and exit code 2."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer

from headwater.cli import (  # noqa: F401  they register commands
    bench,
    chat,
    cluster,
    demo,
    deploy,
    doctor,
    downloads,
    eval,
    inspect,
    replay,
    report,
    serve,
    size,
    tiers,
)
from headwater.cli.common import commands
from headwater.cli.extras import remedy
from headwater.errors import HeadwaterError

ClickException: Any = typer.BadParameter.mro()[2]  # of the click that this typer brings, or the one it imports


def app() -> None:
    """The `headwater` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str], group: typer.Typer = commands, name: str = "headwater") -> int:
    """Run one command line of a group of commands; returns its exit code."""
    try:
        return group(arguments, standalone_mode=False, prog_name=name) or 0
    except ClickException as error:
        message = error.format_message()
    except (HeadwaterError, OSError) as error:
        message = str(error)
    except ModuleNotFoundError as error:
        lines = remedy(error)
        if lines is None:
            raise
        print(f"{name}: {lines}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr)
    return 2


@commands.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Serve hybrid language models with exact prefix caching."""
    if show_version:
        print(f"headwater {version('headwater')}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
