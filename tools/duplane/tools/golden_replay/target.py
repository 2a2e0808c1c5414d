"""The device and the dtype with which traces are replayed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.dtype import torch_dtype
from duplane.worker.models.minicpm_o.loader import ModelParts
from duplane.worker.models.minicpm_o.transfer import upload
from duplane.worker.models.minicpm_o.tts.block import TalkBlock

RELATIVE_TOLERANCES = {torch.bfloat16: 0.0125, torch.float16: 0.002}
"""The public traces have relative errors of up to 0.0085 in bfloat16 and 0.0009 in float16, on a
CPU."""


@dataclass(frozen=True)
class ReplayTarget:
    """The device of a replay; `dtype` and `cuda_graphs` are as in the settings of a worker."""

    device_name: str = "cpu"
    dtype_name: str = "float32"
    cuda_graphs: bool = True

    @cached_property
    def device(self) -> torch.device:
        """The torch device."""
        return torch.device(self.device_name)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The torch dtype. Raises ValueError if the model cannot run in this dtype."""
        return torch_dtype(self.dtype_name)

    @property
    def is_exact(self) -> bool:
        """Whether the tolerances apply: they are for float32."""
        return self.dtype is torch.float32

    @property
    def relative_tolerance(self) -> float:
        """The largest relative error of values in another dtype than float32."""
        return RELATIVE_TOLERANCES.get(self.dtype, 0.0)

    def tensor(self, values: Any) -> Tensor:
        """Copy recorded values to the device, in the dtype in which they were recorded."""
        return upload(values, self.device)

    @torch.inference_mode()
    def capture(self, parts: ModelParts) -> None:
        """Capture the CUDA graphs of loaded parts, if a worker with these settings would do so."""
        if self.device.type != "cuda" or not self.cuda_graphs:
            return
        parts.llm.capture()
        if parts.talker is not None:
            TalkBlock(parts.talker).capture()


CPU_TARGET = ReplayTarget()
