"""A recorder that does on the CPU what a CUDA graph does: the same kernels on the same memory, and none of the Python.

Torch's operations are seen by a dispatch mode, Triton's launches where its interpreter makes them. Whatever would make
a host wait for its device, or copy from one to the other, is an error while a graph is recorded.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from headwater.models.decode_graphs import Work

WAITING = {
    "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::masked_select", "aten::nonzero",
    "aten::unique_consecutive", "aten::_unique2", "aten::bincount", "aten::repeat_interleave",
}  # fmt: skip
FROM_THE_HOST = {"aten::lift_fresh"}  # what `torch.tensor` makes of a list
UNWRITTEN = {"aten::empty", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided", "aten::empty_like"}
FACTORIES = {torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.tensor, torch.zeros}


class Waited(Exception):
    """The host wanted a number of the device, or gave it one."""


class NamedDevices(TorchFunctionMode):
    """Whoever makes a tensor says where: without, it would be on the host, and nothing on a CPU would show it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FACTORIES and kwargs.get("device") is None:
            raise Waited(f"torch.{func.__name__}: on the host, since no device is named")
        return func(*args, **kwargs)


class Recording(TorchDispatchMode):
    """Operations in the order in which they were done."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        name = func._schema.name
        indices = [t for t in tree_leaves(args[1:]) if isinstance(t, torch.Tensor)] if "index" in name else []
        if name in WAITING or any(t.dtype is torch.bool for t in indices):
            raise Waited(f"{name}: the host waits for a number of the device")
        if name in FROM_THE_HOST and args[0].dim():  # a number that fills a slice is made on the device
            raise Waited(f"{name}: a copy from the host to the device")
        out = func(*args, **kwargs)
        self._note(func, args, kwargs, out)
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func._schema.name in UNWRITTEN:
            self.launches.append(lambda: out.fill_(float("nan")) if out.is_floating_point() else None)
            return
        given = {_memory(t) for t in _tensors((args, kwargs))}
        fresh = [(i, t) for i, t in enumerate(tree_leaves(out)) if _is_tensor(t) and _memory(t) not in given]
        if not (fresh or func._schema.is_mutable):
            return  # a view

        def launch() -> None:
            again = tree_leaves(func(*args, **kwargs))
            for i, tensor in fresh:
                tensor.copy_(again[i])

        self.launches.append(launch)


def _is_tensor(x: object) -> bool:
    return isinstance(x, torch.Tensor)


def _tensors(tree: object) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if _is_tensor(t)]


def _memory(tensor: torch.Tensor) -> int:
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage()._cdata


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_: object) -> None:
        raise Waited(f"Tensor.{name}: the host waits for the device")

    return refuse


@contextmanager
def recorded() -> Iterator[list[Callable[[], object]]]:
    """Record the operations in the block, one entry per launch."""
    launch = GridExecutor.__call__
    mode = Recording()

    def noted(kernel: GridExecutor, *args: object, **kwargs: object) -> None:
        with _disable_current_modes():
            launch(kernel, *args, **kwargs)
        mode.launches.append(lambda: launch(kernel, *args, **kwargs))

    refused = [mock.patch.object(torch.Tensor, name, _refused(name)) for name in ("tolist", "item", "cpu", "numpy")]
    with ExitStack() as stack:
        for context in (mock.patch.object(GridExecutor, "__call__", noted), *refused, NamedDevices(), mode):
            stack.enter_context(context)
        yield mode.launches


class Replay:
    """A `Recorder` for tests. As a CUDA graph's, work is done once and then done again to be recorded.

    What it wrote the second time, to `memory`, is undone. `count` says how often something was recorded.
    """

    takes_chains = False

    def __init__(self, *memory: torch.Tensor) -> None:
        self.memory, self.count = memory, 0

    def record(self, work: Work) -> tuple[torch.Tensor, Work]:
        done = work()
        before = [memory.clone() for memory in self.memory]
        with recorded() as launches:
            result = work()
        for memory, content in zip(self.memory, before, strict=True):
            memory.copy_(content)
        self.count += 1

        def again() -> torch.Tensor:
            for launch in launches:
                launch()
            return result

        return done, again
