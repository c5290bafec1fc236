"""Compilers of kernels and of their parts: a part and the body of a loop over threads are linked into the kernel.

Numba by itself optimises each function and makes machine code of it, and of the body of such a loop three times: half
of all compiling. Nothing calls this code, because the kernel's own contains all of it again (decision 035).

Numba documents `pipeline_class`, but not the methods of a code library. Importing this module raises ImportError if one
of them is missing: kernels are then compiled as by numba itself.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.compiler import Compiler
from numba.core.cpu import CPUContext

GC_THRESHOLDS = (50_000, 20, 100)  # rare collections: a compiler makes and keeps some 100,000 objects

for owner, names in (
    (JITCodeLibrary, ("_finalize_dynamic_globals", "_finalize_final_module", "_optimize_final_module")),
    (JITCPUCodegen, ("_library_class", "create_library", "set_env")),
    (CPUContext, ("codegen",)),
    (Compiler, ("compile_extra",)),
):
    if missing := [name for name in names if not hasattr(owner, name)]:
        raise ImportError(f"numba's {owner.__name__} has no {', '.join(missing)}")


class LinkedLibrary(JITCodeLibrary):
    """Code that is linked into kernels as it is, and has no address."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0


class PartCompiler(Compiler):
    """Compiler of a function that only kernels call."""

    def compile_extra(self, function: Any) -> Any:
        self.state.targetctx = _linking(self.state.targetctx)
        return super().compile_extra(function)


class KernelCompiler(PartCompiler):
    """Compiler of a kernel: only it is optimised and becomes machine code, with all functions that it calls."""

    def compile_extra(self, function: Any) -> Any:
        self.state.library = self.state.targetctx.codegen().create_library(function.__qualname__)
        self.state.library.enable_object_caching()  # as numba does with the library that it creates
        before = gc.get_threshold()
        gc.set_threshold(*GC_THRESHOLDS)
        try:
            return super().compile_extra(function)
        finally:
            gc.set_threshold(*before)


def _linking(context: Any) -> Any:
    """Return a context of compilation whose new libraries are linked; their environments have no address, either."""
    codegen = copy.copy(context.codegen())
    codegen._library_class = LinkedLibrary
    codegen.set_env = lambda name, environment: None
    context = copy.copy(context)
    context.codegen = lambda: codegen
    return context
