"""Flags that the verbs of `duplane checkpoint` share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter, Token

from duplane.fabric.settings import PositiveInt, check_bounds
from duplane.worker.settings import GPU_CONTEXT_SHARE, Dtype, Share


def byte_count(text: str) -> int:
    """Read a size such as 141GB or 80 GiB. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(k|M|G|T)(i?)B", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size like 141GB or 80GiB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** ("kMGT".index(match[2]) + 1))


def _byte_count(_: object, tokens: Sequence[Token]) -> int:
    return byte_count(tokens[0].value)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Settings for which memory is estimated. Raises ValueError naming the setting."""

    context: PositiveInt = 8192
    """Rows of each conversation's context."""
    context_share: Share = GPU_CONTEXT_SHARE
    """Share of these rows for which each slot has memory at any time."""
    dtype: Dtype = "bfloat16"
    """Type of the model's numbers."""
    device_memory: Annotated[int | None, Parameter(converter=_byte_count)] = None
    """Print how many slots fit on a device with this memory, such as 141GB or 80GiB."""

    def __post_init__(self) -> None:
        check_bounds(self)
