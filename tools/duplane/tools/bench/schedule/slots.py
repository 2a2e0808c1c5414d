"""The slots of a simulated worker. Each gives its next piece of work, as in the engine."""

from __future__ import annotations

from collections import deque

from duplane.tools.bench.schedule.traffic import Task
from duplane.worker.engine.schedule import (
    BACKGROUND_DEADLINE_S,
    CHAT_DEADLINE_S,
    CHAT_PERIOD_S,
    UNIT_DEADLINE_S,
    Kind,
    Work,
)
from duplane.worker.models.interface import Continue, Item, Part

_DIVIDED = (Part.FEED, Part.SEE)
_STEPWISE = (Part.DECODE, Part.VOCODE)
"""Parts of which a launch does one id or one chunk of a slot."""


class Slot:
    """The tasks of one slot in their order.

    `work` is the next piece; None while there is none, and while a launch does it. `left` is the
    rest of the part that comes next. `task` is the task that has begun, or is the next to begin.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.work: Work | None = None
        self.tasks: deque[Task] = deque()
        self.left = 0
        self._done = 0  # parts of the first task
        self._due_s = 0.0
        self._since_s = 0.0

    @property
    def task(self) -> Task:
        return self.tasks[0]

    def add(self, task: Task, now_s: float) -> None:
        """Add a task that has arrived."""
        self.tasks.append(task)
        if len(self.tasks) == 1:
            self._begin(now_s)

    def launch(self) -> None:
        """Note that a launch does the work."""
        self.work = None

    def advance(self, item: Item, now_s: float) -> Task | None:
        """Note that a launch has done this item; return the task if it is complete."""
        task, left = self.task, 0
        if not isinstance(item, Continue):
            self._done = 0
        elif item.part in _STEPWISE or item.part in _DIVIDED:
            left = self.left - (1 if item.part in _STEPWISE else item.rows)
        if left:
            self.left = left
            self._wait(now_s)
            return None
        if isinstance(item, Continue):
            self._done += 1
        if self._done < len(task.parts):
            part, self.left = task.parts[self._done]
            if part is Part.DECODE:
                self._due_s = max(now_s, self._due_s + CHAT_PERIOD_S)
            self._wait(now_s)
            return None
        self.tasks.popleft()
        if self.tasks:
            self._begin(now_s)
        return task

    def _begin(self, now_s: float) -> None:
        self._since_s = now_s
        self._due_s = now_s - CHAT_PERIOD_S
        self.work = self._work(self.task.item, now_s)

    def _wait(self, now_s: float) -> None:
        part = self.task.parts[self._done][0]
        rows = self.left if part in _DIVIDED or part is Part.VOCODE else 1
        self.work = self._work(Continue(self.number, part, rows), now_s)

    def _work(self, item: Item, now_s: float) -> Work:
        """Return a piece of work with its deadline. The prompt of a chat is background work."""
        task = self.task
        if task.kind is Kind.UNIT:
            return Work(item, Kind.UNIT, task.arrival_s + UNIT_DEADLINE_S, size=task.rows)
        if task.kind is Kind.CHAT and isinstance(item, Continue) and item.part is not Part.FEED:
            return Work(item, Kind.CHAT, self._due_s + CHAT_DEADLINE_S, due_s=self._due_s)
        deadline_s = now_s + BACKGROUND_DEADLINE_S
        return Work(item, Kind.BACKGROUND, deadline_s, since_s=self._since_s)
