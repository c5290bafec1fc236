"""Recording of a step's work, so that it is repeated on the same memory without its Python.

Kernels and torch's operations are noted with their arguments as they run. Numbers that Python read from a tensor would
be those of the recorded step: work that reads any is not repeatable, which is found out while it is recorded.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Call = tuple[Callable[..., object], tuple[Any, ...]]
Work = Callable[[], Tensor]

MIN_BLOCK_BYTES = 4096
IDLE = -(2**63)  # source of a row that is there for steps with more rows, see `drafts.gather_into`
READ_BY_PYTHON = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"}
SIZED_BY_CONTENT = {"aten::masked_select", "aten::nonzero", "aten::bincount", "aten::repeat_interleave"}
UNWRITTEN = {"aten::empty", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided", "aten::empty_like"}
_of_thread = threading.local()


class Block:
    """A stretch of memory, which is free if no tensor over it is left."""

    def __init__(self, size: int) -> None:
        self.bytes: np.ndarray[Any, Any] = torch.empty(size, dtype=torch.uint8).numpy()
        self.first = address(self.bytes)
        self._user: Callable[[], object] = lambda: None

    @property
    def free(self) -> bool:
        return self._user() is None

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor at its beginning."""
        user = self.bytes[: torch.Size(shape).numel() * dtype.itemsize]
        self._user = weakref.ref(user)  # the tensor's memory holds it
        return torch.from_numpy(user).view(dtype).view(shape)


class Pool:
    """Memory for results that recorded work computes. What no tensor holds any more is used for the next one.

    Recorded calls hold the memory by `unheld` arrays: they write and read it in the order in which they were recorded.
    """

    def __init__(self) -> None:
        self._blocks: list[Block] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory of the smallest free block that is large enough; blocks have powers of two bytes."""
        size = max(MIN_BLOCK_BYTES, 1 << (torch.Size(shape).numel() * dtype.itemsize - 1).bit_length())
        block = min(
            (b for b in self._blocks if b.free and len(b.bytes) >= size), key=lambda b: len(b.bytes), default=None
        )
        if block is None:
            block = Block(size)
            self._blocks.append(block)
        return block.tensor(shape, dtype)

    def unheld(self, value: Any) -> Any:
        """Return an argument of a kernel with arrays that do not keep a block from being free."""
        if type(value) is tuple:
            return tuple(map(self.unheld, value))
        if isinstance(value, np.ndarray):
            at = address(value)
            for block in self._blocks:
                if 0 <= at - block.first < len(block.bytes):
                    return block.bytes[at - block.first :][: value.nbytes].view(value.dtype)
        return value

    def unheld_tensor(self, tensor: Tensor) -> Tensor:
        """Return a contiguous tensor over the same memory that does not keep its block from being free."""
        line: np.ndarray[Any, Any] = tensor.view(-1).view(torch.uint8).numpy()
        return torch.from_numpy(self.unheld(line)).view(tensor.dtype).view(tensor.shape)


class Recording:
    """The calls of work in their order, and why they cannot be repeated, if so."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.calls = pool, list[Call]()
        self.read: str | None = None  # what Python read from a tensor
        self.paused = False

    def note(self, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        if not self.paused:
            self.calls.append((function, self.pool.unheld(arguments)))


class CpuRecorder:
    """Recorder of decode steps on a CPU. All recordings share one pool: they run one after the other."""

    takes_chains = True

    def __init__(self) -> None:
        self._pool = Pool()

    def record(self, work: Work) -> tuple[Tensor, Work]:
        """Do the work once; return its result, and a function that repeats it: `work` itself if it is not repeatable.

        The next call of the function overwrites the result.
        """
        recording = _of_thread.recording = Recording(self._pool)
        try:
            with _Functions(recording), _Operations(recording):
                result = work()
        finally:
            _of_thread.recording = None
        if recording.read is not None:
            return result, work
        calls, result = tuple(recording.calls), self._pool.unheld_tensor(result)

        def again() -> Tensor:
            for function, arguments in calls:
                function(*arguments)
            return result

        return result, again


def current() -> Recording | None:
    """Return the recording of this thread, if there is one."""
    return getattr(_of_thread, "recording", None)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return memory on the CPU for the result of a kernel."""
    recording = current()
    return torch.empty(shape, dtype=dtype) if recording is None else recording.pool.empty(shape, dtype)


def note_read(what: str) -> None:
    """Note that work depends on something that a later step may have otherwise: it is not repeatable."""
    recording = current()
    if recording is not None and not recording.paused:
        recording.read = what


@contextmanager
def constant() -> Iterator[None]:
    """Compute something that no later step changes: a repeated step does not compute it again."""
    recording = current()
    if recording is None or recording.paused:
        yield
        return
    recording.paused = True
    try:
        yield
    finally:
        recording.paused = False


def address(array: np.ndarray[Any, Any]) -> int:
    """Return the address of an array's first element."""
    return int(array.__array_interface__["data"][0])


class _Functions(TorchFunctionMode):
    """Finds lists made of tensors, which torch's dispatcher does not see."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist and not self._recording.paused:
            self._recording.read = "tolist"
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Notes torch's operations, without those that only make a view."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import its compiler (147 MB, a second), only to keep it away from here."""
        return False

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        out = func(*args, **kwargs)
        name = func._schema.name
        if self._recording.paused or name in UNWRITTEN:
            return out
        by_mask = name == "aten::index" and any(tensor.dtype == torch.bool for tensor in _tensors(args[1]))
        if by_mask or name in READ_BY_PYTHON or name in SIZED_BY_CONTENT:
            self._recording.read = name
        given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        fresh = [tensor for tensor in _tensors(out) if _memory(tensor) not in given]
        if name == "aten::_to_copy":
            self._recording.calls.append((_convert, (fresh[0], args[0])))
        elif fresh or func._schema.is_mutable:
            self._recording.calls.append((_repeat, (func, args, kwargs, fresh)))
        return out


def _convert(result: Tensor, given: Tensor) -> None:
    """Repeat a conversion in one operation instead of two."""
    result.copy_(given)


def _repeat(func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
    again = _tensors(func(*args, **kwargs))
    for result, tensor in zip(results, again, strict=False):  # none if it wrote to its arguments
        result.copy_(tensor)


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dictionaries, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _memory(tensor: Tensor) -> int:
    """Return a number that tensors over the same memory share."""
    return int(tensor.untyped_storage()._cdata)


def flat(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return the memory from a tensor's first element to its last one, at any strides: float32, or int16 for bfloat16.

    The element at indices (i, j, …) is at the sum of index times stride. The array is valid as long as the tensor.
    """
    line = tensor.detach() if tensor.requires_grad else tensor
    if line.is_contiguous():  # takes a third of the time of the general case
        line = line.view(-1)
    else:
        extent = 1 + sum((n - 1) * stride for n, stride in zip(line.shape, line.stride(), strict=True))
        line = line.as_strided((extent if line.numel() else 0,), (1,))
    line = line.view(torch.int16) if line.dtype == torch.bfloat16 else line
    array: np.ndarray[Any, Any] = line.numpy()
    return array
