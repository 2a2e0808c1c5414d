"""Runs the stages of a group one after the other, each with its deadline."""

from __future__ import annotations

import faulthandler
import sys
import time
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from device_hour.plan import GROUP_S, Stage
from device_hour.results import Results, State
from device_hour.session import Options, Session, memory_gb
from duplane.worker.models.interface import DeviceLostError

LOST = (torch.AcceleratorError, DeviceLostError)


def run_group(group: str, stages: Sequence[Stage], options: Options) -> int:
    """Run the stages that have no result yet; return 0 if all of the group have one, else 1.

    A stage that has failed or that ended the process in an earlier run is left out, so that another
    run comes to the stages after it; `options.again` runs it again. After an error of the device
    itself no further stage begins.
    """
    results = Results(options.out)
    session = Session(options, results)
    end_s = time.monotonic() + GROUP_S
    over = {State.DONE} if options.again else {State.DONE, State.FAILED, State.BEGUN}
    wanted = {s.name for s in stages if not s.is_setup and results.state(group, s.name) not in over}
    is_lost = False
    for stage in stages:
        if is_lost or not (stage.name in wanted or (wanted and stage.is_setup)):
            continue
        if not options.rehearses and time.monotonic() + stage.planned_s > end_s:
            results.note(group, stage.name, state=State.NO_TIME)
            print(f"{stage.name}: no time left", flush=True)
            continue
        is_lost = _run_stage(group, stage, session, end_s)
    return int(any(results.state(group, stage.name) is not State.DONE for stage in stages))


def _run_stage(group: str, stage: Stage, session: Session, end_s: float) -> bool:
    """Run a stage and record its result; return whether the device is lost."""
    results, options = session.results, session.options
    results.forget(group, stage.name)
    note = partial(results.note, group, stage.name)
    note(state=State.BEGUN, planned_s=stage.planned_s)
    print(f"\n{group}: {stage.name}, {stage.planned_s:.0f} s planned", flush=True)
    begin = time.monotonic()
    session.keep = lambda found: note(result=found)
    planned_s, deadline_s = stage.planned_s, min(stage.deadline_s, end_s - begin)
    if options.rehearses:  # the times are those of a GPU
        planned_s = deadline_s = GROUP_S
    session.ends_s = begin + planned_s
    is_lost = False
    try:
        with _deadline(deadline_s):
            note(result=stage.run(session))
        note(state=State.DONE, memory_gb=memory_gb(session.device))
    except Exception as error:  # noqa: BLE001 - the next stage may work
        traceback.print_exc()
        note(state=State.FAILED, error=f"{type(error).__name__}: {error}"[:2000])
        print(f"FAILED: {stage.name}: {error!r}"[:300], flush=True)
        is_lost = isinstance(error, LOST) or not _is_clean(session)
    note(seconds=time.monotonic() - begin)
    print(f"{stage.name}: {time.monotonic() - begin:.1f} s", flush=True)
    return is_lost


def _is_clean(session: Session) -> bool:
    """Clean up after a failure; return whether the device still works."""
    try:
        session.clean_up()
    except LOST:
        return False
    return True


@contextmanager
def _deadline(seconds: float) -> Generator[None]:
    """End the process, with a traceback of each thread, if the body takes longer than `seconds`.

    A call that hangs in the driver cannot be interrupted otherwise.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
