"""What the machine is, how long the load takes, and whether memory and results are as planned."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, cast

import torch

from device_hour.session import Session, memory_gb
from duplane.tools.bench.peaks import MATRIX_SIDE, measure_peaks
from duplane.tools.golden_replay.run import PARTS, replay_traces
from duplane.tools.golden_replay.target import ReplayTarget
from duplane.worker.engine.warm_up import warm_up
from duplane.worker.models.minicpm_o import proof
from duplane.worker.models.minicpm_o.dtype import torch_dtype

GOLDEN = Path(__file__).parents[3] / "tests" / "golden" / "public"
QUERY = (
    "name,driver_version,vbios_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,"
    "temperature.gpu,mig.mode.current,ecc.mode.current"
)
QUEUED_PRODUCTS = 1000
"""Products that run while the clocks are read: about a second on an H200."""


def environment(session: Session) -> dict[str, Any]:
    """Return versions, clocks under load, and the peak rates of copies and matrix products."""
    device = session.device
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count() or 0,
        "device": session.options.device_name,
        "dtype": session.options.dtype,
    }
    if device.type == "cuda":
        # torch declares no type for the result.
        properties = cast("Any", torch.cuda).get_device_properties(device)
        found |= {
            "name": properties.name,
            "memory_gb": properties.total_memory / 1e9,
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": str(torch.version.cuda),
            "cudnn": torch.backends.cudnn.version() or 0,
        }
    session.keep(found)
    kinds = {torch_dtype(session.options.dtype), torch.float32}
    peaks = measure_peaks(device, kinds)
    found["copied_gb_per_s"] = peaks.bytes_per_s / 1e9
    for kind, flops in peaks.flops_per_s.items():
        found[f"tflops_{str(kind).removeprefix('torch.')}"] = flops / 1e12
    if device.type == "cuda":
        found["under_load"] = _clocks(device)
    return found


def _clocks(device: torch.device) -> dict[str, str]:
    """Return what nvidia-smi reads while the device multiplies matrices."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    side = MATRIX_SIDE[device.type]
    matrix = torch.ones(side, side, dtype=torch.bfloat16, device=device)
    product = torch.empty_like(matrix)
    for _ in range(QUEUED_PRODUCTS):
        torch.mm(matrix, matrix, out=product)
    command = [
        program,
        f"--id={device.index or 0}",
        f"--query-gpu={QUERY}",
        "--format=csv,noheader",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if run.returncode:
        return {"error": run.stdout}
    return dict(zip(QUERY.split(","), run.stdout.strip().split(", "), strict=False))


def checkpoint(session: Session) -> dict[str, Any]:
    """Write the random checkpoint, unless this machine has it."""
    directory, seconds = session.checkpoint()
    files = [path for path in directory.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return {"folder": str(directory), "written_s": seconds, "gb": size / 1e9}


def memory_plan(session: Session) -> dict[str, Any]:
    """Return the planned memory, and the number of slots that fits."""
    free_bytes, slots = session.fitting()
    planned = {
        each.name: {"fixed_gb": each.fixed_bytes / 1e9, "slot_gb": each.slot_bytes / 1e9}
        for each in session.planned
    }
    context = session.sizes.context
    return {"free_gb": free_bytes / 1e9, "context": context, "slots": slots, "planned": planned}


def load(session: Session, *, captures: bool = True, warms_up: bool = True) -> dict[str, Any]:
    """Load the model, and warm it up as a worker does; compare its memory with the plan."""
    before, first_report = memory_gb(session.device), len(proof.reports)
    torch_before = _settings()
    loaded = session.loaded(captures=captures)
    found: dict[str, Any] = {"slots": loaded.model.slot_count, "memory_before_gb": before}
    if warms_up:
        begin = time.monotonic()
        warm_up(loaded.driver.preparer, loaded.driver.model)
        loaded.seconds["warm-up"] = time.monotonic() - begin
    slots = loaded.model.slot_count
    planned_bytes = sum(each.fixed_bytes + slots * each.slot_bytes for each in session.planned)
    return found | {
        "seconds": loaded.seconds,
        "planned_gb": planned_bytes / 1e9,
        "tensors_gb": loaded.model.memory_bytes / 1e9,
        "memory_gb": memory_gb(session.device),
        "torch_before": torch_before,
        "torch_after": _settings(),
        "proofs": [
            {"kind": each.kind, "errors": each.errors, "switched_off": each.faults}
            for each in proof.reports[first_report:]
        ],
    }


def _settings() -> dict[str, bool]:
    """Return torch's settings. After a load on a GPU, cuDNN's attention and TF32 must be off."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "cudnn_attention": cuda.cudnn_sdp_enabled(),
        "flash_attention": cuda.flash_sdp_enabled(),
        "memory_efficient_attention": cuda.mem_efficient_sdp_enabled(),
        "tf32_products": cuda.matmul.allow_tf32,
        "tf32_convolutions": cudnn.allow_tf32,
    }


def traces(session: Session) -> dict[str, Any]:
    """Replay the recorded traces in float32. Raises RuntimeError if the results differ."""
    parts = {name: PARTS[name] for name in PARTS if name == "tts" or not session.options.rehearses}
    found: dict[str, Any] = {}
    for cuda_graphs in (True, False):
        begin = time.monotonic()
        target = ReplayTarget(session.options.device_name, cuda_graphs=cuda_graphs)
        code = replay_traces(GOLDEN, parts, target)
        found["graphs" if cuda_graphs else "eager"] = {
            "seconds": time.monotonic() - begin,
            "exit_code": code,
        }
        session.keep(found)
    if any(each["exit_code"] for each in found.values()):
        raise RuntimeError("the results differ from the traces; see the lines with FAIL")
    return found
