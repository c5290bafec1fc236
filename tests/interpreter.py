"""Triton's interpreter in less time: functions of the language are replaced once a kernel, not at each call of a part.

The interpreter replaces `triton.language`'s functions by its own when a kernel is called, and again whenever the kernel
calls another function. They are there already then: looking for them took a third of the time.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any


def replace_once() -> None:
    """Change the interpreter, if Triton was imported and has the functions in question."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if not (hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope")):
        return
    replace, language = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    replaced: set[int] = set()  # modules, while a kernel runs

    def once(function: Any) -> Any:
        seen = {id(value) for value in function.__globals__.values() if inspect.ismodule(value) and value in language}
        if seen and seen <= replaced:
            return interpreter._LangPatchScope()
        scope = replace(function)
        restore = scope.restore
        replaced.update(seen)

        def restored() -> None:
            replaced.clear()
            restore()

        scope.restore = restored
        return scope

    interpreter._patch_lang = once
