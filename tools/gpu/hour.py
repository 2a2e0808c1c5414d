"""The first hour on a GPU of which nothing is known, in groups of stages; see README.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from device_hour.plan import GROUPS, shown
from device_hour.runner import run_group
from device_hour.session import Options
from duplane.fabric.monitoring.logs import configure_logging


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a group, or in a rehearsal all of them; return 0 if all stages have a result, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", nargs="?", choices=tuple(GROUPS), help="all in a rehearsal")
    parser.add_argument("--plan", action="store_true", help="print the plan and exit")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results")
    parser.add_argument("--checkpoint", type=Path, help="folder; default: random, full size")
    parser.add_argument("--device", help="default: cuda:0, or cpu in a rehearsal")
    parser.add_argument("--dtype", help="default: bfloat16, or float32 in a rehearsal")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model, short stages")
    parser.add_argument("--no-graphs", action="store_true", help="capture no CUDA graphs")
    parser.add_argument("--again", action="store_true", help="repeat stages that have failed")
    flags = parser.parse_args(arguments)
    if flags.plan:
        print(shown())
        return 0
    if flags.group is None and not flags.rehearse:
        parser.error("name a group: each is a process of its own")
    options = Options(
        out=flags.out,
        checkpoint=flags.checkpoint,
        device_name=flags.device or ("cpu" if flags.rehearse else "cuda:0"),
        dtype=flags.dtype or ("float32" if flags.rehearse else "bfloat16"),
        cuda_graphs=not flags.no_graphs,
        rehearses=flags.rehearse,
        again=flags.again,
    )
    configure_logging("hour", "WARNING")
    groups = [flags.group] if flags.group else list(GROUPS)
    return max([run_group(group, GROUPS[group], options) for group in groups])


if __name__ == "__main__":
    sys.exit(main())
