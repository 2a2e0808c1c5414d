"""Typed wrappers of torch functions whose types are missing or incomplete."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch
from numpy.typing import NDArray
from safetensors import torch as safetensors_torch
from torch import Tensor, distributed
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from duplane.worker.models.minicpm_o.dtype import has_bfloat16


def seed_all(seed: int) -> None:
    """Seed torch's default random generator."""
    cast("Any", torch).manual_seed(seed)


def length(values: Tensor) -> Tensor:
    """Return the Euclidean norm of all values."""
    return values.square().sum().sqrt()


def split(values: Tensor, sizes: int | Sequence[int]) -> tuple[Tensor, ...]:
    """Split the first dimension into parts of one size, or of the given sizes."""
    return cast("Any", torch).split(values, sizes if isinstance(sizes, int) else list(sizes))


def transposed(matrix: Tensor) -> Tensor:
    """Transpose a matrix."""
    return matrix.transpose(0, 1)


def integers(values: Tensor) -> list[int]:
    """Return the values of a row of integers as a list."""
    return cast("Any", values).tolist()


def backward(loss: Tensor) -> None:
    """Compute the gradients of a loss."""
    cast("Any", loss).backward()


def take_step(optimiser: torch.optim.Optimizer) -> None:
    """Take a step of a torch optimiser."""
    cast("Any", optimiser).step()


class PreciseAttention(TorchFunctionMode):
    """Runs attention in float32. On a CPU its gradients in bfloat16 take three times as long."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch."""
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        with torch.autocast("cpu", enabled=False):
            queries, keys, values = (states.float() for states in args)
            return func(queries, keys, values, **(kwargs or {}))


@contextlib.contextmanager
def mixed_precision(*, is_allowed: bool) -> Generator[None]:
    """Run matrix products in bfloat16 if this is allowed and the CPU has instructions for them.

    Weights and attention remain in float32.
    """
    if not (is_allowed and has_bfloat16(torch.device("cpu"))):
        yield
        return
    with warnings.catch_warnings():
        # A norm has its weights in float32; torch warns that it is slower with such weights.
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        with torch.autocast("cpu", torch.bfloat16), PreciseAttention():
            yield


def sum_over_processes(values: Tensor) -> None:
    """Sum the values over all processes, in place."""
    cast("Any", distributed).all_reduce(values)


def load_tensors(path: Path) -> dict[str, Any]:
    """Read a file of `torch.save`, without running code in it."""
    return cast("Any", torch).load(path, weights_only=True)


def save_tensors(state: Mapping[str, Any], path: Path) -> None:
    """Write a file that `load_tensors` reads. A process that is killed leaves the file before."""
    part = path.with_suffix(".part")
    cast("Any", torch).save(dict(state), part)
    part.replace(path)


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read a file of safetensors."""
    return cast("Any", safetensors_torch).load_file(path)


def tensor_of(values: NDArray[Any]) -> Tensor:
    """Return an array as a tensor that shares its memory."""
    return cast("Any", torch).from_numpy(values)


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of tensors and their names."""
    made = sha256()
    for name, value in tensors.items():
        made.update(name.encode())
        made.update(value.detach().contiguous().numpy().tobytes())
    return made.hexdigest()
