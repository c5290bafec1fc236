"""`headwater cluster upgrade`: its settings, and what a new model must have in common with the one that is served."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwater.cli.settings import check_policies, from_all, values_of
from headwater.cluster.cost import Role
from headwater.config import SETTINGS, ServeConfig
from headwater.errors import ConfigError
from headwater.setting import SettingError

# the others are those of routers, which are not replaced, or fixed when the cluster starts
UPGRADABLE_NAMES = (
    "model", "weights", "reproducible", "recheck", "memory", "cache", "placement", "eviction",
    "decode_reuse", "segment_share", "segment_eviction", "healing", "tier", "tier_store", "tier_key", "tier_timeout",
    "max_tokens_per_step", "constraint_time",
)  # fmt: skip
UPGRADABLE = tuple(one for one in SETTINGS if one.name in UPGRADABLE_NAMES)
POLL_SECONDS = 0.2  # seconds between looks at the state of an upgrade
ACCEPT_SECONDS = 60.0  # seconds for a cluster to read the new model's texts, and to begin


def seen_of(config: ServeConfig) -> dict[str, str]:
    """Return the parts of a model that routers and clients see, each as a text or a digest.

    Raises CheckpointError or ConfigError for a model that cannot be read.
    """
    from headwater.cli.router_process import routed_model  # needs torch

    model = routed_model(config)
    texts: dict[str, Any] = {
        "tokenizer": model.tokenizer.to_str(),
        "chat template": model.chat_template,
        "special tokens": model.special_tokens,
        "generation_config.json": model.generation,
    }
    digests = {name: hashlib.sha256(json.dumps(text).encode()).hexdigest() for name, text in texts.items()}
    sizes = {
        "size of the vocabulary": model.spec.vocab_size,
        "longest prompt": model.spec.max_length,
        "size of a page": model.spec.page_bytes,
        "length of convolutions": model.spec.conv_taps,
    }
    return digests | {name: f"{size:,}" for name, size in sizes.items()}


def upgraded(
    config: ServeConfig, values: Mapping[str, Any], seen: Mapping[str, str], name: str, roles: Mapping[Role, int]
) -> ServeConfig:
    """Return settings with some of them replaced; `seen` is of the model that is served under `name`.

    Raises ConfigError or CheckpointError if they no longer fit each other, or the routers.
    """
    new = replace(config, **{"model_name": name, **values})
    check_policies(new)
    check_roles(new, roles)
    other = [what for what, text in seen_of(new).items() if text != seen[what]]
    if other:
        raise ConfigError(
            f"{new.model or 'the embedded model'} differs from the model that is served in: {', '.join(other)}. "
            "Routers and clients depend on these: start another cluster for it"
        )
    return new


def check_roles(config: ServeConfig, roles: Mapping[Role, int]) -> None:
    """Raise ConfigError if there are workers that prefill for others, and the settings do not allow it."""
    from headwater.cluster.hosting import pulls  # needs the web framework

    if roles.get(Role.PREFILL) and not pulls(config):
        must = "workers pull prefixes with a cache, and not with decode_reuse raw"
        raise ConfigError(f"prefill is {roles[Role.PREFILL]}, must be 0 with these settings: {must}")


def given_values(flags: Mapping[str, object], environment: Mapping[str, str], file: Path | None) -> dict[str, Any]:
    """Return the values of upgradable settings that are given, with paths that hold in another process.

    Raises ConfigError, which names setting, value and source.
    """
    given = {name: one for name, one in from_all(flags, environment, file).items() if name in UPGRADABLE_NAMES}
    try:
        values = values_of(given)
    except SettingError as error:
        raise error.at(given[error.name].origin if error.name in given else "") from error
    return {name: value.absolute() if isinstance(value, Path) else value for name, value in values.items()}


def steps(state: Callable[[], dict[str, Any]], number: str) -> Iterator[str]:
    """Yield the steps of an upgrade until it has ended. Raises ConfigError if it is refused or abandoned.

    `state`: the cluster's reported state; empty, if it is not known now.
    """
    until = time.monotonic() + ACCEPT_SECONDS
    shown = 0
    while True:
        now = state()
        if number in now.get("refused", ()):
            raise ConfigError(now["refused"][number])
        upgrade = now.get("upgrade")
        if upgrade is not None and upgrade["id"] == number:
            yield from upgrade["said"][shown:]
            shown = len(upgrade["said"])
            if upgrade["error"]:
                raise ConfigError(upgrade["error"])
            if upgrade["ended"]:
                return
        elif time.monotonic() > until:
            raise ConfigError(f"the cluster did not begin the upgrade within {ACCEPT_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)
