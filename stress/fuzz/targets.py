"""The targets, by name."""

from __future__ import annotations

from stress.fuzz import answers, files, http, prompts
from stress.fuzz.target import Target

TARGETS: dict[str, Target] = {
    "bodies": http.BODIES,
    "fields": http.FIELDS,
    "formats": answers.FORMATS_TARGET,
    "events": answers.EVENTS,
    "texts": answers.TEXTS,
    "settings": files.SETTINGS_TARGET,
    "config": files.CONFIG_TARGET,
    "gguf": files.GGUF_TARGET,
    "safetensors": files.SAFETENSORS,
    "messages": prompts.MESSAGES,
    "constraints": prompts.CONSTRAINTS,
}
