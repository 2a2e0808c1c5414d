"""When the parts of copies are sent, on a virtual clock."""

from __future__ import annotations

import asyncio
import itertools

from simulation.virtual_time import run

from duplane.worker.session.copy_pace import CopyPace


class Copies:
    """Copies whose parts are asked for one after the other, and the times of the parts."""

    def __init__(self, pace: CopyPace) -> None:
        self.pace = pace
        self.begin_s = now_s()
        self.sent: list[tuple[str, float]] = []

    def attach(self, name: str, part_count: int) -> None:
        self.pace.attached()
        self.ask(name, part_count, now_s())

    def ask(self, name: str, part_count: int, since_s: float) -> None:
        def send() -> None:
            self.sent.append((name, round(now_s() - self.begin_s, 2)))
            if part_count > 1:
                self.ask(name, part_count - 1, since_s)

        self.pace.ask(since_s, send)


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_parts_are_sent_a_second_after_the_last_attach() -> None:
    async def test() -> None:
        copies = Copies(CopyPace())
        copies.attach("first", 2)
        await asyncio.sleep(0.6)
        copies.attach("second", 1)
        await asyncio.sleep(10)
        assert copies.sent == [("first", 1.6), ("first", 1.6), ("second", 1.6)]

    run(test())


def test_copies_that_wait_for_five_seconds_are_sent_while_others_attach() -> None:
    async def test() -> None:
        copies = Copies(CopyPace())
        copies.attach("first", 2)
        for number in range(14):
            await asyncio.sleep(0.5)
            copies.attach(f"later {number}", 1)
        await asyncio.sleep(0.5)
        assert copies.sent[:2] == [("first", 5.0), ("first", 5.0)]
        assert copies.sent[2:] == [(f"later {one}", 5.5 + one / 2) for one in range(5)]

    run(test())


def test_copy_whose_part_was_written_slowly_is_not_delayed_by_later_copies() -> None:
    async def test() -> None:
        copies, loop = Copies(CopyPace()), asyncio.get_running_loop()
        copies.attach("first", 1)
        await asyncio.sleep(4.5)
        copies.attach("second", 1)
        loop.call_later(0.25, copies.ask, "first, later", 1, 0.0)
        await asyncio.sleep(5)
        assert copies.sent == [("first", 1.0), ("first, later", 5.0), ("second", 5.5)]

    run(test())


def test_other_events_come_between_two_parts() -> None:
    async def test() -> None:
        copies, counts = Copies(CopyPace()), list[int]()
        copies.attach("first", 4)
        copies.attach("second", 4)
        await asyncio.sleep(0.99)
        while len(copies.sent) < 8:
            await asyncio.sleep(0 if copies.sent else 0.001)
            counts.append(len(copies.sent))
        assert max(b - a for a, b in itertools.pairwise(counts)) == 1

    run(test())


def test_no_part_is_sent_after_the_end() -> None:
    async def test() -> None:
        copies = Copies(CopyPace())
        copies.attach("first", 1)
        copies.pace.stop()
        await asyncio.sleep(10)
        assert not copies.sent

    run(test())
