"""Triton's interpreter in less time: what it computes again at each operation is computed once.

It replaces `triton.language`'s functions by its own when a kernel is called, again whenever the kernel calls another
function, and puts Triton's back after the kernel. Here they are replaced once and stay: nothing is compiled for a card
in these processes. Each call of one went through two more, which looked for an argument that the first of them sets.
Each sum and product of integers is computed a second time in 64 bits, to assert that it fits, but nothing is asserted
unless `debug` is set. Types and shapes of blocks are few, and were made anew for each block. Two blocks of one type and
one shape need no conversion.

Its products are NumPy's, whose rows depend on the number of rows with some BLAS (OpenBLAS with AVX2; with AVX-512 only
a single row). On a card they do not, so that here each output is summed in one fixed order.
"""

import inspect
import sys
from dataclasses import replace
from typing import Any

import numba
import numpy as np


def prepare() -> None:
    """Change the interpreter, if Triton was imported and has the functions in question."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    _sum_in_fixed_order(interpreter)
    _replace_once(interpreter)
    _leave_out_what_is_not_asserted(interpreter)
    _call_directly(interpreter)
    _keep_types(interpreter)
    _broadcast_what_differs(interpreter)
    _convert_what_differs(interpreter)


@numba.njit(cache=True)
def add_product(out_RN: np.ndarray, x_RK: np.ndarray, w_KN: np.ndarray) -> None:
    """Add `x_RK @ w_KN` to `out_RN`; each output is summed in the order of K, whatever R and N are."""
    for row in range(x_RK.shape[0]):
        for k in range(x_RK.shape[1]):
            for column in range(w_KN.shape[1]):
                out_RN[row, column] += x_RK[row, k] * w_KN[k, column]


def product(x: np.ndarray, w: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return `x @ w` in `dtype`, [..., R, K] x [..., K, N], with rows that do not depend on R."""
    heads = np.broadcast_shapes(x.shape[:-2], w.shape[:-2])
    out = np.zeros((*heads, x.shape[-2], w.shape[-1]), dtype)
    x, w = (np.ascontiguousarray(np.broadcast_to(one, heads + one.shape[-2:]), dtype) for one in (x, w))
    for at in np.ndindex(heads):
        add_product(out[at], x[at], w[at])
    return out


def _sum_in_fixed_order(interpreter: Any) -> None:
    handle = interpreter.TensorHandle

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        narrow = [one.dtype for one in (a, b) if one.dtype.primitive_bitwidth < 16 or one.data.dtype == np.uint16]
        assert not narrow, f"the interpreter's product has no {narrow[0]}"
        return handle(product(a.data, b.data, d.data.dtype) + d.data, d.dtype.scalar)

    type(interpreter.interpreter_builder).create_dot = create_dot


def _leave_out_what_is_not_asserted(interpreter: Any) -> None:
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if hasattr(options, "sanitize_overflow") and not options.debug:
        builder.options = replace(options, sanitize_overflow=False)


def _keep_types(interpreter: Any) -> None:
    """Find types' NumPy types, blocks' types and their shapes where they were found before."""
    core = interpreter.tl.core
    find, arrays = interpreter._get_np_dtype, {}

    def of_array(of: Any) -> Any:
        name = of.scalar.name
        if name not in arrays:
            arrays[name] = find(of.scalar)
        return arrays[name]

    interpreter._get_np_dtype = of_array
    known_type, known_shape = core.block_type.__init__, core.tensor.__init__
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_type(block: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in types:
            known_type(block, element_ty, shape)
            types[key] = dict(vars(block))
        vars(block).update(types[key])

    def init_tensor(tensor: Any, handle: Any, of: Any) -> None:
        key = tuple(of.shape.values) if of.is_block() else ()
        if key not in shapes:
            known_shape(tensor, handle, of)
            shapes[key] = (tensor.shape, tensor.numel)
        tensor.handle, tensor.type, tensor.dtype = handle, of, of.scalar
        tensor.shape, tensor.numel = shapes[key]

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor
    equal, equal_blocks = core.dtype.__eq__, core.block_type.__eq__
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    core.block_type.__eq__ = lambda self, other: self is other or equal_blocks(self, other)


def _broadcast_what_differs(interpreter: Any) -> None:
    semantic: Any = type(interpreter.interpreter_semantic)
    broadcast = semantic.broadcast_impl_value

    def unless_equal(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:  # kept above
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = unless_equal


def _convert_what_differs(interpreter: Any) -> None:
    """Leave out the promotion of two blocks of one type, which every operation of two blocks begins with."""
    language, semantic = interpreter.tl, type(interpreter.interpreter_semantic)
    plain = (language.float32, language.int32, language.int64)  # they stay what they are in divisions, too
    check, block = semantic.binary_op_type_checking_impl, language.core.tensor

    def unless_equal(self: Any, lhs: Any, rhs: Any, *how: Any, **named: Any) -> tuple[Any, Any]:
        blocks = type(lhs) is block and type(rhs) is block
        if blocks and lhs.dtype is rhs.dtype and lhs.shape is rhs.shape and lhs.dtype in plain:
            return lhs, rhs
        return check(self, lhs, rhs, *how, **named)

    semantic.binary_op_type_checking_impl = unless_equal


def _call_directly(interpreter: Any) -> None:
    """Call what `triton.language`'s decorator wraps: it asserts that an argument is there, which is set here."""
    if not hasattr(interpreter, "_patch_attr"):
        return
    semantic = interpreter.interpreter_semantic
    wrapper = interpreter.tl.core.builtin(lambda: None).__code__

    def replace_function(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*args, **named)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = replace_function


def _replace_once(interpreter: Any) -> None:
    if not (hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope")):
        return
    patch, language = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    replaced: set[int] = set()  # modules
    seen: set[Any] = set()  # functions, all of whose modules are replaced

    def once(function: Any) -> Any:
        if function not in seen:
            modules = {id(one) for one in function.__globals__.values() if inspect.ismodule(one) and one in language}
            if not (modules and modules <= replaced):
                patch(function)
            replaced.update(modules)
            seen.add(function)
        return interpreter._LangPatchScope()  # of no change: nothing is restored

    interpreter._patch_lang = once
