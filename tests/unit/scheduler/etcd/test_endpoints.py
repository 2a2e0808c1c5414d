"""The choice of the member to call."""

from __future__ import annotations

from support.clock import Clock

from duplane.scheduler.etcd.endpoints import Endpoints


async def test_calls_stay_with_the_member_that_answers() -> None:
    endpoints = Endpoints(["a:1", "b:1", "c:1"], clock=Clock())
    second = endpoints.find("b:1")
    assert second
    endpoints.note_answer(second)
    assert [endpoints.pick() for _ in range(3)] == [second] * 3
    assert endpoints.pick(avoided=second) is not second


async def test_failed_member_is_avoided_for_longer_with_each_failure() -> None:
    clock = Clock()
    endpoints = Endpoints(["a:1", "b:1"], clock=clock)
    first = endpoints.pick()
    for pause_s in (0.5, 1.0, 2.0, 4.0, 5.0, 5.0):
        endpoints.note_failure(first)
        assert endpoints.pick() is not first
        clock.now_s += pause_s - 0.01
        assert endpoints.pick() is not first
        clock.now_s += 0.02
        assert endpoints.pick() is first
    endpoints.note_answer(first)
    endpoints.note_failure(first)
    clock.now_s += 0.51
    assert endpoints.pick() is first


async def test_when_all_have_failed_the_first_to_recover_is_called() -> None:
    clock = Clock()
    endpoints = Endpoints(["a:1", "b:1"], clock=clock)
    first, second = endpoints.pick(), endpoints.pick(endpoints.pick())
    endpoints.note_failure(first)
    endpoints.note_failure(first)
    endpoints.note_failure(second)
    assert endpoints.pick() is second
    assert endpoints.pick(avoided=second) is first


async def test_only_member_is_called_even_if_it_is_to_be_avoided() -> None:
    endpoints = Endpoints(["a:1"], clock=Clock())
    assert endpoints.pick(endpoints.pick()).address == "a:1"
