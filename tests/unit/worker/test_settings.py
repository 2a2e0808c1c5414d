"""Settings of a worker: an invalid value is refused, and the error names its setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from duplane.worker.settings import SessionLimits, WorkerSettings


def test_the_least_that_must_be_said_is_enough() -> None:
    settings = WorkerSettings(checkpoint=Path("c"), schedulers=("127.0.0.1:8010",))
    assert settings.worker_id
    assert settings.context_token_limit == 8192


def test_two_workers_of_one_host_have_different_names() -> None:
    names = {WorkerSettings(checkpoint=Path("c"), schedulers=("a:1",)).worker_id for _ in range(20)}
    assert len(names) == 20


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("slot_count", 0),
        ("context_share", 0.0),
        ("context_share", 1.5),
        ("threads", -1),
        ("stuck_after_s", 0.0),
        ("listen", "localhost"),
        ("listen", ":80"),
        ("advertise", "host:port"),
        ("advertise", ""),
        ("schedulers", ()),
        ("schedulers", ("a:1", "")),
        ("schedulers", ("a:65536",)),
    ],
)
def test_what_cannot_be_is_named(setting: str, value: object) -> None:
    values = {
        "checkpoint": Path("c"),
        "schedulers": ("a:1",),
        "listen": "0.0.0.0:0",
        "advertise": "host:1",
        setting: value,
    }
    with pytest.raises(ValueError, match=setting):
        WorkerSettings(**values)


def test_limits_of_a_session_are_checked_too() -> None:
    with pytest.raises(ValueError, match="idle_timeout_s"):
        WorkerSettings(
            checkpoint=Path("c"), schedulers=("a:1",), limits=SessionLimits(idle_timeout_s=0)
        )


@pytest.mark.parametrize(
    "values",
    [{}, {"device": "cuda:0", "family": "echo"}, {"device": "cuda:0", "checkpoint": "scripted"}],
)
def test_slots_by_memory_need_a_gpu(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="slot_count is auto, must be a number without a GPU"):
        WorkerSettings(**{"checkpoint": Path("c"), "slot_count": "auto", **values})
    settings = WorkerSettings(checkpoint=Path("c"), slot_count="auto", device="cuda:0")
    with pytest.raises(ValueError, match="slot_count is auto"):
        _ = settings.given_slot_count


@pytest.mark.parametrize(
    ("device", "share", "reserved"),
    [("cpu", "auto", 1.0), ("cuda:0", "auto", 0.6), ("cpu", 0.3, 0.3), ("cuda:0", 1.0, 1.0)],
)
def test_slots_of_a_gpu_reserve_a_part_of_their_context(
    device: str, share: object, reserved: float
) -> None:
    values = {"checkpoint": Path("c"), "device": device, "context_share": share}
    assert WorkerSettings(**values).given_context_share == reserved
