"""Versions, precision, attention back ends, and the recorded traces in float32."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from duplane.tools.bench.peaks import measure_peaks, synchronize
from duplane.tools.golden_replay.run import PARTS, replay_traces
from duplane.tools.golden_replay.target import ReplayTarget
from duplane.worker.models.minicpm_o.dtype import torch_dtype
from measure import Options, Report, load, read_options

GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "public"
BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)
KEY_HEADS, GROUP, HEAD_DIM = 8, 4, 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases; return the exit code."""
    options = read_options(arguments)
    report = Report("sanity", options)
    with report.case("peaks"):
        peaks(options, report)
    with report.case("settings of torch"):
        settings(options, report)
    with report.case("attention"):
        attention(options, report)
    with report.case("traces"):
        traces(options, report)
    return report.exit_code


def peaks(options: Options, report: Report) -> None:
    """Measure the device's peak rates of copies and matrix products."""
    dtypes = {torch_dtype(options.dtype), torch.float32}
    found = measure_peaks(options.device, dtypes)
    table = report.table("peaks", ("", "per second"))
    table.add("GB copied (read and written)", found.bytes_per_s / 1e9)
    for dtype, flops in found.flops_per_s.items():
        table.add(f"TFLOP of products in {str(dtype).removeprefix('torch.')}", flops / 1e12)


def settings(options: Options, report: Report) -> None:
    """Show torch's settings before and after the model is loaded.

    After loading, cuDNN attention and TF32 must be off.
    """
    table = report.table("settings of torch", ("", "before", "after load"))
    before = _settings()
    load(options, GOLDEN / "checkpoint", 2, 512, cuda_graphs=False)
    for name, value in _settings().items():
        table.add(name, before[name], value)


def _settings() -> dict[str, str]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "cuDNN attention": str(cuda.cudnn_sdp_enabled()),
        "flash attention": str(cuda.flash_sdp_enabled()),
        "memory-efficient attention": str(cuda.mem_efficient_sdp_enabled()),
        "TF32 in products": str(cuda.matmul.allow_tf32),
        "TF32 in convolutions": str(cudnn.allow_tf32),
    }


def attention(options: Options, report: Report) -> None:
    """Measure attention of one row per conversation: two calls at one length, one at another."""
    dtype = torch_dtype(options.dtype)
    table = report.table(
        "attention of one layer, ms",
        ("back end, conversations, rows, mask", "first call", "same again", "new length"),
    )
    sizes = [(2, 50)] if options.small else [(1, 500), (32, 500), (32, 8000)]
    for backend in BACKENDS:
        for slots, length in sizes:
            for is_masked in (False, True):
                name = f"{backend.name} {slots} {length} {'mask' if is_masked else '-'}"
                if not report.has_time(name):
                    return
                times = [
                    _attend(options.device, dtype, slots, rows, backend, is_masked=is_masked)
                    for rows in (length, length, length + 1)
                ]
                table.add(name, *("refused" if found is None else found for found in times))


def _attend(
    device: torch.device,
    dtype: torch.dtype,
    slots: int,
    length: int,
    backend: SDPBackend,
    *,
    is_masked: bool,
) -> float | None:
    """Return the milliseconds of a call; None if the back end does not support it."""
    queries = torch.randn(slots, KEY_HEADS, GROUP, HEAD_DIM, device=device, dtype=dtype)
    keys = torch.randn(slots, KEY_HEADS, length, HEAD_DIM, device=device, dtype=dtype)
    mask = None
    if is_masked:
        lengths = torch.randint(1, length + 1, (slots, 1, 1, 1), device=device)
        mask = torch.arange(length, device=device) < lengths
    synchronize(device)
    begin = time.perf_counter()
    try:
        with sdpa_kernel([backend]):
            functional.scaled_dot_product_attention(queries, keys, keys, mask)
    except RuntimeError:
        return None
    synchronize(device)
    return 1e3 * (time.perf_counter() - begin)


def traces(options: Options, report: Report) -> None:
    """Replay the recorded traces on the device, in float32."""
    table = report.table("recorded traces in float32", ("CUDA graphs", "seconds", "exit code"))
    parts = {name: PARTS[name] for name in PARTS if name == "tts" or not options.small}
    for cuda_graphs in (True, False):
        begin = time.monotonic()
        code = replay_traces(
            GOLDEN, parts, ReplayTarget(options.device_name, cuda_graphs=cuda_graphs)
        )
        table.add("on" if cuda_graphs else "off", time.monotonic() - begin, code)
        if code:
            raise RuntimeError("the model does not reproduce the traces; see the lines with FAIL")


if __name__ == "__main__":
    sys.exit(main())
