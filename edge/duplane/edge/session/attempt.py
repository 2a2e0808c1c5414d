"""One attempt of a session to move to another worker. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from duplane.edge.clock import Moment
from duplane.edge.session.move_table import MoveCause
from duplane.edge.session.slot import Slot


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt to move, with the progress at the next worker.

    `tried_workers` are the workers that this session has left or tried in vain since it wants to
    leave its worker.
    """

    number: int = 0  # attempts of the session so far, from 1; 0 before the first one
    count: int = 0  # attempts since the session wants to leave its worker, from 1
    cause: MoveCause = MoveCause.WORKER_LOST
    from_worker_id: str = ""
    slot: Slot = field(default_factory=Slot)
    tried_workers: dict[str, str] = field(default_factory=dict[str, str])  # id -> incarnation
    silent_since: Moment | None = None  # since when units wait; None while a worker gets them
    rebuilds_since: Moment | None = None  # since when the next worker has the settings
    sent_count: int = 0  # past units that were sent
    catch_up_count: int = 0
    is_permitted: bool = False  # the session may rebuild its conversation
