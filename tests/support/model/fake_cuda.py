"""Simulates a CUDA device on the CPU. Operations that mix device and host tensors raise an error.

The tensors of the simulated device are wrappers around CPU tensors. Within `elsewhere()`,
`device="cuda"` creates such wrappers. A `Border` then records each copy between host and device and
each wait of the host, with the function of the worker that caused it. The simulation does not cover
kernels, streams, memory or time.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from duplane.tools.bench.launches import attend_to_pages
from duplane.worker.models.minicpm_o.audio.encoder import AudioEncoder
from duplane.worker.models.minicpm_o.blocks import graph
from duplane.worker.models.minicpm_o.llm import operations
from duplane.worker.models.minicpm_o.vocoder.vocoder import Vocoder

DEVICE = "cuda:0"
THERE, HERE = torch.device(DEVICE), torch.device("cpu")
WORKER = f"{Path('duplane', 'worker')}/"

_PLACE = torch.ops.prim.device.default
# These operations may copy between host and device, in either direction.
COPIES = {"aten::copy_", "aten::_to_copy", "aten::copy"}
# These operations accept indices on the host: CUDA copies the indices, and the host waits.
INDEXED = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
# In these operations the host waits for the value of a tensor, or for the size of a result.
READS = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::is_nonzero",
    "aten::unique_dim",
    "aten::_unique2",
}
# Only these functions see that a tensor is on the simulated device. Other functions see a CPU
# tensor: for a CUDA tensor, torch would look for a driver.
PLACED = {
    torch.as_tensor,
    *(getattr(Tensor, name) for name in ("to", "cpu", "cuda", "is_cuda", "is_cpu")),
    cast("Any", Tensor.device).__get__,
}
PRODUCTS = {
    f"aten::{name}"
    for name in ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "addmv", "mv", "dot")
}


class Way(Enum):
    """The direction of a copy: UP to the device, DOWN to the host, or SENT to it without a wait."""

    UP = "up"
    DOWN = "down"
    SENT = "sent"


@dataclass(frozen=True)
class Crossing:
    """One copy between host and device, or one wait of the host for the device."""

    way: Way
    operation: str
    where: str
    """File and function of the worker, such as `transfer.py upload`; empty for other code."""
    callers: str
    """Files and functions of the callers within the worker."""


class DeviceError(RuntimeError):
    """An operation that CUDA would refuse."""


class _Thread(threading.local):
    seems_here = False


_thread = _Thread()


class Elsewhere(Tensor):
    """A tensor on the simulated device."""

    _inside: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=HERE,
            dispatch_device=True,
        )
        made._inside = inner
        return cast("Elsewhere", made)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Elsewhere({self._inside!r})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`.

        During the call, tensors report that they are on the CPU, unless `func` is in PLACED.
        """
        if func is Tensor.tolist:  # PyTorch does not support it for subclasses
            return args[0].cpu().tolist()
        before, _thread.seems_here = _thread.seems_here, func not in PLACED
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        finally:
            _thread.seems_here = before

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _PLACE:
            return HERE if _thread.seems_here else THERE
        raise DeviceError(f"{func}: a tensor of the device is used outside of elsewhere()")


@contextmanager
def _truly_placed() -> Iterator[None]:
    before, _thread.seems_here = _thread.seems_here, False
    try:
        yield
    finally:
        _thread.seems_here = before


@dataclass(frozen=True)
class _Operation:
    """What an operation of torch does, as far as it matters between host and device."""

    name: str
    takes_scalars: bool
    """Whether tensors without dimensions may be on the host."""
    is_mutable: bool
    """Whether the operation changes one of its arguments."""

    @staticmethod
    @cache
    def of(func: Any) -> _Operation:
        name = func._schema.name
        takes_scalars = torch.Tag.pointwise in func.tags or name in INDEXED or "fill" in name
        return _Operation(name, takes_scalars, func._schema.is_mutable)


def _inside(value: Any, there: list[Elsewhere], here: list[Tensor]) -> Any:
    """Return `value` with each wrapper replaced by its inner tensor.

    Adds the wrappers to `there`, and the other tensors to `here`.
    """
    if isinstance(value, Elsewhere):
        there.append(value)
        return value._inside
    if isinstance(value, Tensor):
        here.append(value)
    elif isinstance(value, list | tuple):
        return [_inside(one, there, here) for one in cast("list[Any]", value)]
    return value


def _outside(value: Any, there: Sequence[Elsewhere]) -> Any:
    """Return `value` with each tensor wrapped; reuse the wrapper in `there` if there is one."""
    if isinstance(value, Tensor):
        if value.device.type == "meta":
            return value
        for wrapper in there:
            if wrapper._inside is value:
                return wrapper
        return Elsewhere(value)
    if isinstance(value, list | tuple):
        return tuple(_outside(one, there) for one in cast("list[Any]", value))
    return value


_generators: set[int] = set()


def _address(generator: torch.Generator) -> int:
    """Return the address of a generator's C++ object, which PyTorch may wrap again."""
    return cast("Any", generator)._cdata


class _Generator(torch.Generator):
    """A CPU generator. `_generators` lists the generators that were created for `cuda`."""

    def __new__(cls, device: str | torch.device = "cpu") -> _Generator:
        return super().__new__(cls)

    def __init__(self, device: str | torch.device = "cpu") -> None:
        if torch.device(device).type == "cuda":
            _generators.add(_address(self))
            weakref.finalize(self, _generators.discard, _address(self))


class Border(TorchDispatchMode):
    """Carries out each operation on the inner tensors. Records crossings, or raises DeviceError."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and torch's wrapper would slow each operation."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.crossings: list[Crossing] = []
        self.is_capturing = False
        self._refuses_waits = False

    def set_sync_debug_mode(self, mode: int | str) -> None:
        """Replace `torch.cuda.set_sync_debug_mode`, including its warning about a prototype."""
        self._refuses_waits = mode in (2, "error")
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)

    def synchronize(self, device: object = None) -> None:
        """Replace `torch.cuda.synchronize`: the host waits for all work of the device."""
        self._cross(Way.DOWN, "synchronize")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _PLACE:
            return Elsewhere.__torch_dispatch__(func, types, args)
        given: dict[str, Any] = kwargs or {}
        operation = _Operation.of(func)
        if operation.name == "aten::to":  # `decompose` reduces its overloads
            args, given = tree_map_only(torch.device, _with_index, (args, given))
            with self, _truly_placed():
                return func.decompose(*args, **given)
        there: list[Elsewhere] = []
        here: list[Tensor] = []
        inside = [_inside(value, there, here) for value in args]
        named = {
            name: _inside(value, there, here)
            for name, value in given.items()
            if name != "pin_memory"
        }
        place = named.get("device")
        goes_there = bool(there) if place is None else torch.device(place).type == "cuda"
        if not there and not goes_there:
            return func(*inside, **named)
        self._check(operation, args, given, there, here, goes_there=goes_there)
        if place is not None:
            named["device"] = HERE
        # Inference mode is off, because a view of an ordinary tensor must be an ordinary tensor.
        # Its end restores the mode of gradients, too.
        with torch._C._InferenceMode(False):
            torch._C._set_grad_enabled(False)
            result = func(*inside, **named)
            if operation.is_mutable and any(one.shape != one._inside.shape for one in there):
                raise NotImplementedError(f"{func} changes a shape in place")
            return _outside(result, there) if goes_there else result

    def _check(
        self,
        operation: _Operation,
        args: Any,
        kwargs: Any,
        there: Sequence[Elsewhere],
        here: Sequence[Tensor],
        *,
        goes_there: bool,
    ) -> None:
        """Record crossings; raise DeviceError for what CUDA would refuse.

        The tensors of the call are `there` on the device, or `here`.
        """
        name = operation.name
        if name in COPIES:
            target = _is_elsewhere(args[0]) if name != "aten::_to_copy" else goes_there
            source = _is_elsewhere(args[0] if name == "aten::_to_copy" else args[1])
            if target != source:
                is_sent = name == "aten::copy_" and (*args, False)[2]
                self._cross(Way.UP if target else Way.SENT if is_sent else Way.DOWN, name)
            return
        if name in READS and there:
            self._cross(Way.DOWN, name)
        host = [tensor for tensor in here if tensor.device.type == "cpu"]
        if name in INDEXED and there:
            self._check_indices(name, args)
            indices = [id(index) for index in args[1] if index is not None]
            host = [tensor for tensor in host if id(tensor) not in indices]
        if there and any(tensor.dim() or not operation.takes_scalars for tensor in host):
            shapes = [(tuple(tensor.shape), str(tensor.device)) for tensor in (*there, *here)]
            raise DeviceError(
                f"{name}: Expected all tensors to be on the same device, but found at least two "
                f"devices, {DEVICE} and cpu! {shapes}"
            )
        if name in PRODUCTS and not args[0].is_floating_point():
            raise DeviceError(f"{name} is not implemented for {args[0].dtype} on CUDA")
        generator = kwargs.get("generator")
        if goes_there and generator is not None and _address(generator) not in _generators:
            raise DeviceError(f"{name}: Expected a 'cuda' device type for generator, found 'cpu'")

    def _check_indices(self, name: str, args: Any) -> None:
        indices = [index for index in args[1] if index is not None]
        if not _is_elsewhere(args[0]):
            raise DeviceError(f"{name}: indices should be on the same device as the tensor (cpu)")
        if not all(_is_elsewhere(index) for index in indices):
            self._cross(Way.UP, name)
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            self._cross(Way.DOWN, name)

    def _cross(self, way: Way, operation: str) -> None:
        frames = list(_worker_frames())
        self.crossings.append(
            Crossing(way, operation, frames[0] if frames else "", " < ".join(frames[1:4]))
        )
        if self.is_capturing:
            raise DeviceError(f"{operation} while a graph is captured: {frames}")
        if self._refuses_waits and way is Way.DOWN:
            raise DeviceError(f"{operation} called a synchronizing CUDA operation: {frames}")


def _with_index(device: torch.device) -> torch.device:
    return THERE if device.type == "cuda" else device


def _is_elsewhere(tensor: object) -> bool:
    return isinstance(tensor, Elsewhere)


def _worker_frames() -> Iterator[str]:
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if WORKER in code.co_filename:
            yield f"{Path(code.co_filename).name} {code.co_name}"
        frame = frame.f_back


class _PlayedEvent:
    """Replaces `torch.cuda.Event`. The device reaches every event immediately."""

    def __init__(self, border: Border, *, enable_timing: bool = False) -> None:
        self._reached_s = 0.0
        self.synchronize = border.synchronize

    def record(self) -> None:
        self._reached_s = time.monotonic()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: _PlayedEvent) -> float:
        return (later._reached_s - self._reached_s) * 1e3


class CaptureError(Exception):
    """An operation that CUDA would refuse in a capture. The model must not hide it."""


class _PlayedGraph:
    """Replaces `graph.Graph`. A copy or a wait during capture is an error.

    What the first call copies once for all calls is no error. A replay calls the function again.
    """

    pool = None

    def __init__(self, border: Border, call: Callable[[], None]) -> None:
        border.is_capturing = True
        try:
            try:
                call()
            except DeviceError:
                call()
        except DeviceError as error:
            raise CaptureError(str(error)) from error
        finally:
            border.is_capturing = False
        self.replay = call


def _played_names(border: Border, memory_bytes: int) -> Iterable[tuple[Any, str, Any]]:
    """Return the owner, name and replacement of each function that needs the real device."""
    kernels = {"attend": attend_to_pages, "place_heads": operations.place_heads}
    return (
        (torch.cuda, "_lazy_init", lambda: None),
        (Tensor, "pin_memory", lambda tensor: tensor),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "set_device", lambda device: None),
        (torch.cuda, "synchronize", border.synchronize),
        (torch.cuda, "Event", partial(_PlayedEvent, border)),
        (torch.cuda, "Stream", lambda device=None: SimpleNamespace(synchronize=border.synchronize)),
        (torch.cuda, "device", lambda device: nullcontext()),
        (torch.cuda, "stream", lambda stream: border),
        (torch.cuda, "set_sync_debug_mode", border.set_sync_debug_mode),
        (torch.cuda, "memory_allocated", lambda device=None: 0),
        (torch.cuda, "mem_get_info", lambda device=None: (memory_bytes, memory_bytes)),
        (torch.cuda, "get_device_name", lambda device=None: "played"),
        (torch, "Generator", _Generator),
        # The kernels need a real device.
        (operations, "kernels", lambda: SimpleNamespace(**kernels)),
        (graph, "Graph", lambda call, pool=None: _PlayedGraph(border, call)),
    )


@contextmanager
def elsewhere(*, warms_up: bool = False, memory_bytes: int = 80 * 10**9) -> Iterator[Border]:
    """Simulate the CUDA device `cuda:0`, with so much memory, for the operations of this thread.

    Without `warms_up`, models leave out the batches that they run when they are loaded. These
    batches are large, and nothing here depends on them.
    """
    border = Border()
    with pytest.MonkeyPatch.context() as patch, border:
        for owner, name, played in _played_names(border, memory_bytes):
            patch.setattr(owner, name, played)
        for stage in () if warms_up else (AudioEncoder, Vocoder):
            patch.setattr(stage, "warm_up", lambda stage: None)
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` first makes a CPU tensor
        try:
            yield border
        finally:
            torch._C._set_only_lift_cpu_tensors(False)
