"""docs/settings.md, from the declarations in `headwater.config`."""

from __future__ import annotations

from itertools import groupby

from headwater.config import SETTINGS
from headwater.setting import Setting

HEAD = """\
# Settings

Settings of `headwater serve`, generated from the code by `make pages`. [sizing.md](sizing.md#tuning) explains which
ones to tune, [deploy.md](deploy.md) how to run the server.

A setting is a flag (`--max-running 32`), a variable (`HEADWATER_MAX_RUNNING=32`) or a line of a TOML file
(`max_running = 32`; `max-running` is also accepted). **A flag overrides the environment, the environment overrides
the file, the file overrides the default.** `headwater serve --print-config` prints the settings and the source of
each.

The file is named with `--config` or `HEADWATER_CONFIG`. Unknown names in it are refused, and paths in it are relative
to it. An empty variable counts as unset; a variable with a misspelt name causes a warning. Switches are `--cache` and
`--no-cache`, or `true` and `false`.

```toml
# /etc/headwater/headwater.toml
model = "/srv/models/some-hybrid"
memory = "16GB"
host = "0.0.0.0"
max_running = 8
request_timeout = 600
api_key_file = "api-key"            # /etc/headwater/api-key
cors = ["https://chat.example"]
log_format = "json"
```

An `api_key_file` has one key, or, if its name ends in `.toml`, several. It is read again at SIGHUP; an invalid file is
logged, and the earlier keys stay.

```toml
# /etc/headwater/keys.toml
[ann]                               # name in logs and metrics; the rest but `key` is optional
key = "a text that cannot be guessed"
namespace = "team"                  # of the cache, which keys may share; without it, the name
share = 2                           # of the computation, against 1 of other keys
requests_per_minute = 60            # beyond a limit the answer is 429, with Retry-After
tokens_per_minute = 100_000         # of prompts and answers, cached ones included
running = 4                         # requests at the same time
until = 2027-01-31                  # last day, in UTC; or a time
```

Limits are of each router's process. Requests of several `cache_salt`s divide the namespace of a key, not its share.
"""
GUIDES = {  # page that explains a group
    "Model": "[weights.md](weights.md), [models.md](models.md)",
    "Memory and cache": "[sizing.md](sizing.md), [policy.md](policy.md), [segments.md](segments.md), "
    "[tiers.md](tiers.md)",
    "Scheduling": "[speculation.md](speculation.md), [trouble.md](trouble.md#overload)",
    "Network": "[trouble.md](trouble.md#overload)",
    "Access": "[deploy.md](deploy.md#security)",
    "Logging": "[metrics.md](metrics.md#logs)",
    "KV events": "[kv-events.md](kv-events.md)",
}


def page() -> str:
    """Return the whole page, with a table for each group of settings."""
    groups = [_group(name, tuple(members)) for name, members in groupby(SETTINGS, lambda one: one.group)]
    return "\n".join([HEAD, *groups])


def _group(name: str, members: tuple[Setting, ...]) -> str:
    rows = "\n".join(_row(one) for one in members)
    return (
        f"## {name}\n\nExplained in {GUIDES[name]}.\n\n| setting | default | meaning |\n| --- | --- | --- |\n{rows}\n"
    )


def _row(one: Setting) -> str:
    choices = f" One of {', '.join(f'`{name}`' for name in one.choices)}." if one.choices else ""
    default = one.unset if one.default is None else f"`{one.show(one.default)}`" if one.default != () else "none"
    default = default.replace("|", "\\|")  # in a table even a code's bar ends its cell
    return f"| `{one.name}` | {default} | {one.help}{choices} |"
