"""`make drills`: causes each fault of the runbook and follows its page.

Exits with 1 if a drill fails, and with 2 if a program is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import time
import traceback
from pathlib import Path

import pytest
from drills import edge_drills, fabric_drills
from drills.drills import DRILLS

_MODULES = (edge_drills, fabric_drills)  # importing them has registered their drills


def main() -> int:
    """Run the drills that are named, or all; return the exit code."""
    parser = argparse.ArgumentParser(prog="make drills", description=__doc__)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=", ".join(DRILLS))
    parser.add_argument("--out", type=Path, default=Path("build/drills"), help="folder of logs")
    told = parser.parse_args()
    if unknown := set(told.pages) - DRILLS.keys():
        parser.error(f"no such page: {', '.join(sorted(unknown))}")
    shutil.rmtree(told.out, ignore_errors=True)
    failed: list[str] = []
    for page in told.pages or DRILLS:
        folder = (told.out / page).absolute()
        folder.mkdir(parents=True)
        began_s = time.monotonic()
        outcome = "passed"
        try:
            asyncio.run(_run(page, folder))
        except pytest.skip.Exception as missing:
            sys.stdout.write(f"{missing}\n")
            return 2
        except Exception:  # noqa: BLE001 - a failed drill must not keep the others from running
            traceback.print_exc()
            outcome = "FAILED"
            failed.append(page)
        sys.stdout.write(f"{page}: {outcome} after {time.monotonic() - began_s:.0f} s\n")
        sys.stdout.flush()
    return 1 if failed else 0


async def _run(page: str, folder: Path) -> None:
    await DRILLS[page].run(folder)


if __name__ == "__main__":
    sys.exit(main())
