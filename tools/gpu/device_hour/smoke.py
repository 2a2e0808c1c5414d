"""Everything that a conversation can do, once: whether it works on this device at all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from device_hour.driver import OPTIONS, Driver
from device_hour.session import Session
from duplane.worker.models.chat import ChatMessage, ChatOptions, ChatRequest, ChatRole
from duplane.worker.models.interface import Rebuild
from duplane.worker.models.types import DecodeMode, PastUnit, Rebuilt, UnitOutput, WindowMode

GREEDY = replace(OPTIONS, decode_mode=DecodeMode.GREEDY, seed=0)
WINDOW_UNITS = 2
MOST_UNITS = 12
"""The most units until a short turn must have ended."""
CHAT_TOKENS = 12


class SmokeError(Exception):
    """The model did not do what a step has asked for."""


def smoke(session: Session) -> dict[str, Any]:
    """Run every step, also after one has failed. Raises SmokeError at the end if one has failed."""
    driver = session.loaded().driver
    found: dict[str, Any] = {}
    for step in (listen, see, speak, interrupt, slide, chat, pause, rebuild):
        begin = time.monotonic()
        try:
            note = step(driver)
            if dirty := driver.close():
                raise SmokeError(f"slots {dirty} are not clean")
        except (SmokeError, RuntimeError, ValueError) as error:
            note = f"FAILED: {error}"
            driver.close()
        found[step.__name__] = {"note": note, "seconds": time.monotonic() - begin}
        print(f"  {step.__name__}: {note}", flush=True)
        session.keep(found)
    if failed := [name for name, step in found.items() if step["note"].startswith("FAILED")]:
        raise SmokeError(f"failed: {', '.join(failed)}")
    return found


def _demand(is_met: object, what: str) -> None:
    if not is_met:
        raise SmokeError(what)


def listen(driver: Driver) -> str:
    """Listen to two units."""
    driver.open(0)
    driver.listen([0])
    (output,) = driver.listen([0]).outputs
    _demand(output.is_listen and not len(output.audio), "it did not listen")
    return f"context {output.context_length}"


def see(driver: Driver) -> str:
    """Listen to a unit with a picture."""
    if not driver.model.constants.accepts_pictures:
        return "the checkpoint has no vision"
    driver.open(0)
    (output,) = driver.see([0]).outputs
    _demand(output.input_video_count, "the picture was not fed")
    return f"{output.input_video_count} rows"


def speak(driver: Driver) -> str:
    """Speak for about two seconds, and end the turn."""
    driver.open(0)
    outputs = list(_turn(driver, 0, units=2))
    _demand(outputs[-1].end_of_turn, "the turn did not end")
    samples = sum(len(output.audio) for output in outputs)
    _demand(samples, "there is no sound")
    return f"{len(outputs)} units, {samples} samples"


def _turn(driver: Driver, slot: int, units: int) -> Iterator[UnitOutput]:
    """Speak until a turn of about `units` units ends, or for `MOST_UNITS`."""
    for number in range(MOST_UNITS):
        (output,) = driver.speak([slot], 0 if number else units).outputs
        yield output
        if output.end_of_turn:
            return


def interrupt(driver: Driver) -> str:
    """Interrupt a long turn; then speak again."""
    driver.open(0)
    driver.speak([0], MOST_UNITS)
    (output,) = driver.listen([0]).outputs
    _demand(output.interrupted_turn and output.is_listen, "the turn was not interrupted")
    (output,) = driver.speak([0], 1).outputs
    _demand(len(output.audio), "it does not speak after the interruption")
    return "speaks again"


def slide(driver: Driver) -> str:
    """Listen to more units than the context window keeps."""
    opened = driver.open(
        0, replace(GREEDY, sliding_window_mode=WindowMode.CONTEXT, context_max_units=WINDOW_UNITS)
    )
    _demand(opened.has_window, "there is no window")
    lengths = [driver.listen([0]).outputs[0].context_length for _ in range(3 * WINDOW_UNITS)]
    _demand(max(lengths[-2:]) <= max(lengths[:-2]), f"the context grows: {lengths}")
    return f"contexts {lengths}"


def chat(driver: Driver) -> str:
    """Answer a chat."""
    if not driver.model.constants.has_chat:
        return "the checkpoint has no chat template"
    options = ChatOptions(decode_mode=DecodeMode.GREEDY, max_new_tokens=CHAT_TOKENS)
    request = ChatRequest((ChatMessage(ChatRole.USER, ("Say yes.",)),), options)
    outputs = driver.chat(0, request)
    _demand(outputs and outputs[-1].finish, "the answer did not finish")
    return f"{sum(len(output.token_ids) for output in outputs)} ids, {outputs[-1].finish}"


def pause(driver: Driver) -> str:
    """Let a conversation pause while another one runs."""
    driver.open(0)
    driver.speak([0], MOST_UNITS)
    driver.open(1)
    for _ in range(2):
        driver.listen([1])
    (output,) = driver.speak([0]).outputs
    _demand(len(output.audio), "it does not speak after the pause")
    return "speaks on"


def rebuild(driver: Driver) -> str:
    """Rebuild a conversation in another slot; both must then have contexts of the same length."""
    for slot in (0, 1):
        driver.open(slot, GREEDY)
    past: list[PastUnit] = []
    for number in range(4):
        unit = driver.noise(0, force_listen=number % 2 == 0)
        (output,) = driver.units([unit]).outputs
        again = driver.prepared(replace(unit, slot=1))
        past.append(PastUnit(again, output.token_ids, output.state, output.context_length))
    while True:
        (rebuilt,) = (one for one in driver.run([Rebuild(1, past)]) if isinstance(one, Rebuilt))
        past = past[rebuilt.unit_count :]
        if rebuilt.is_complete:
            break
    both = driver.units([driver.noise(0), driver.noise(1)]).outputs
    lengths = {output.context_length for output in both}
    _demand(len(lengths) == 1, f"contexts differ: {lengths}")
    return "equal contexts"
