"""Flags of `duplane bench model` and `leases`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le
from cyclopts import Parameter, Token
from cyclopts.types import ExistingDirectory

from duplane.fabric.settings import NonNegativeInt, PositiveInt, check_bounds
from duplane.scheduler.store import check_url
from duplane.worker.settings import Dtype


def _counts(_: object, tokens: Sequence[Token]) -> tuple[int, ...]:
    parts = [part.strip() for token in tokens for part in token.value.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError("must be numbers like 1,2,4")
    return tuple(int(part) for part in parts)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ModelBench:
    """What to measure, and with how many conversations. Raises ValueError naming the setting."""

    checkpoint: ExistingDirectory | None = None
    """Checkpoint directory. Default: random weights."""
    like: str = "minicpm-o-4.5"
    """Model whose dimensions random weights have."""
    scale: float = 0.1
    """Factor of all widths and numbers of layers of random weights; 1 is full size."""
    device: str = "cpu"
    """Device of the model: cpu or cuda:N."""
    dtype: Dtype = "float32"
    """Type of the model's numbers."""
    slots: Annotated[
        tuple[int, ...],
        Parameter(converter=_counts, n_tokens=1, negative=()),
    ] = (1, 2, 4)
    """Conversations at once, separated by commas; one table is printed for each number."""
    units: PositiveInt = 10
    """Units of each kind to measure."""
    frames: Annotated[NonNegativeInt, Le(8)] = 1
    """Pictures in each unit with pictures; 0 leaves these units out."""
    cuda_graphs: bool = True
    """Capture short steps as CUDA graphs. Has an effect on cuda:N only."""
    threads: PositiveInt = 1
    """CPU threads of the model."""

    def __post_init__(self) -> None:
        check_bounds(self)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LeaseBench:
    """What to measure of the scheduler. Raises ValueError naming the setting."""

    policy_only: bool = False
    """Measure the decisions without sockets, by size of the fabric; no other flag has an effect."""
    store: str = "memory:"
    """Where the schedulers keep leases, as in `duplane scheduler --store`."""
    replicas: PositiveInt = 1
    """Schedulers. More than one need a store that they share."""
    kills: bool = False
    """Kill a scheduler after every 200 grants; it is started again."""
    grants: Annotated[int, Ge(2)] = 2000
    """Requests to make through the queue."""
    callers: PositiveInt = 64
    """Requests at once."""
    workers: PositiveInt = 8
    """Workers, without a model."""
    slots: PositiveInt = 4
    """Slots of each worker."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_url(self.store)
        if self.replicas > 1 and self.store == "memory:":
            raise ValueError("replicas: more than one scheduler needs a shared store")
