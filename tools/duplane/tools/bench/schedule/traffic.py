"""What arrives at a simulated worker: units with their work, chats, and openings."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from duplane.tools.bench.schedule.costs import UNIT_STEPS
from duplane.worker.engine.schedule import Kind
from duplane.worker.models.interface import Item, Open, Part, RunUnit, StartChat
from duplane.worker.models.types import Unit

WARM_UP_S = 3.0
"""Units that arrive before this time are not counted."""
UNIT_ROWS, PIECE_ROWS = 15, 66
"""Rows of a unit with its closing ids, and of a piece of a picture."""
MOST_IDS, MEAN_IDS = 19, 8.4
"""Ids of a spoken unit: from 6 on, few of them many."""
CONTEXT_ROWS = 8192
CHAT_IDS, CHAT_PIECES, CHAT_STEPS, CHAT_CHUNKS = 10, 20, 40, 2
"""A piece of a chat's answer: its ids, the steps of the talker and the chunks of the vocoder."""
CHAT_CONTEXT = 4000
_SOUND = np.zeros(0, np.float32)


@dataclass(frozen=True)
class Traffic:
    """The load of one run.

    - `sessions`: conversations, of which the share `speaking` speaks at a time.
    - `seconds`: how long units arrive.
    - `large_per_s`: units with a picture of `pieces` pieces, per second over all conversations.
    - `video`: the share of conversations with a picture of one piece in each unit.
    - `chats`: chats that are answered at a time. `opens_per_s`: openings of conversations.
    """

    sessions: int
    speaking: float = 0.5
    seconds: float = 40.0
    large_per_s: float = 0.0
    pieces: int = 10
    video: float = 0.0
    chats: int = 0
    opens_per_s: float = 0.0


def mixed(sessions: int, speaking: float, seconds: float) -> Traffic:
    """Return conversations with pictures, video, chats and openings beside them."""
    return Traffic(
        sessions, speaking, seconds, large_per_s=0.5, video=0.25, chats=2, opens_per_s=0.5
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """A prompt of a conversation or a chat, of which the simulation knows the length only."""

    rows: int
    image_rows: int = 0
    audio_rows: int = 0
    uses_tts_voice: bool = False

    @property
    def prompt_rows(self) -> int:
        return self.rows


@dataclass(slots=True, eq=False)
class Task:
    """The work of one unit, chat or opening.

    `parts` are the parts of the model in their order, each with its amount: rows of FEED, pieces of
    SEE, ids of DECODE, steps of TALK, chunks of VOCODE. `context` is the number of rows that the
    slot has before. A chat arrives again when it is complete.
    """

    slot: int
    arrival_s: float
    item: Item
    kind: Kind
    parts: tuple[tuple[Part, int], ...]
    context: int
    is_large: bool = False
    speaks: bool = False
    begins_turn: bool = False

    @property
    def rows(self) -> int:
        return self.item.rows


def tasks(traffic: Traffic, chance: random.Random) -> list[Task]:
    """Return all work that arrives, in the order of its arrival.

    Each conversation has a slot, then each chat, then each opening.
    """
    found = [
        task for slot in range(traffic.sessions) for task in _conversation(traffic, slot, chance)
    ]
    large = round(traffic.large_per_s * traffic.seconds)
    for place in chance.sample(range(len(found)), min(large, len(found))):
        found[place] = _with_pieces(found[place], traffic.pieces)
    slot = traffic.sessions
    found += [chat(slot + number, 0.0, chance) for number in range(traffic.chats)]
    slot += traffic.chats
    found += _openings(traffic, slot, chance)
    return sorted(found, key=lambda task: task.arrival_s)


def chat(slot: int, arrival_s: float, chance: random.Random) -> Task:
    """Return a chat with a spoken answer."""
    rows = chance.randint(500, 4000)
    piece = ((Part.DECODE, CHAT_IDS), (Part.TALK, CHAT_STEPS), (Part.VOCODE, CHAT_CHUNKS))
    return Task(
        slot,
        arrival_s,
        StartChat(slot, Rows(rows)),
        Kind.CHAT,
        ((Part.FEED, rows), *(CHAT_PIECES * piece)),
        CHAT_CONTEXT,
    )


def _conversation(traffic: Traffic, slot: int, chance: random.Random) -> Iterator[Task]:
    """Yield the units of a conversation: one a second, from a random moment of the second on."""
    phase_s, context = chance.random(), chance.randint(300, 7500)
    pieces = 1 if chance.random() < traffic.video else 0
    speaks = chance.random() < traffic.speaking
    left = chance.randint(1, 10) if speaks else round(chance.random() * _silence(traffic))
    for number in range(int(traffic.seconds)):
        begins = False
        if left <= 0:
            speaks = _next_speaks(traffic.speaking, speaks)
            begins = speaks
            silence = max(1, round(chance.random() * _silence(traffic)))
            left = chance.randint(3, 10) if speaks else silence
        left -= 1
        yield _unit(
            slot,
            phase_s + number + 0.01 * chance.random(),
            pieces,
            (context + 17 * number) % CONTEXT_ROWS,
            _speech(chance, ends=left <= 0) if speaks else (),
            begins,
        )


def _silence(traffic: Traffic) -> float:
    """Return the most units between turns; turns have 6.5 units on average."""
    return 13 * (1 - traffic.speaking) / max(traffic.speaking, 1e-6)


def _next_speaks(speaking: float, speaks: bool) -> bool:
    """Return whether the model speaks after it has spoken, or been silent, long enough."""
    if speaking in (0, 1):
        return speaking == 1
    return not speaks


def _speech(chance: random.Random, *, ends: bool) -> tuple[tuple[Part, int], ...]:
    """Return the parts of a spoken unit after its input; the end of a turn is a chunk more."""
    ids = min(MOST_IDS, 6 + int(chance.expovariate(1 / 2.9)))
    return (Part.DECODE, ids), (Part.TALK, UNIT_STEPS), (Part.VOCODE, 2 if ends else 1)


def _unit(
    slot: int,
    arrival_s: float,
    pieces: int,
    context: int,
    speech: tuple[tuple[Part, int], ...],
    begins_turn: bool,
) -> Task:
    rows = UNIT_ROWS + PIECE_ROWS * pieces
    seen = ((Part.SEE, pieces),) if pieces else ()
    return Task(
        slot,
        arrival_s,
        RunUnit(Unit(slot, _SOUND, rows=rows)),
        Kind.UNIT,
        ((Part.HEAR, 1), *seen, (Part.FEED, rows), *speech),
        context,
        speaks=bool(speech),
        begins_turn=begins_turn,
    )


def _with_pieces(task: Task, pieces: int) -> Task:
    """Return the same unit with a large picture."""
    speech = task.parts[-3:] if task.speaks else ()
    large = _unit(task.slot, task.arrival_s, pieces, task.context, speech, task.begins_turn)
    large.is_large = True
    return large


def _openings(traffic: Traffic, slot: int, chance: random.Random) -> Iterator[Task]:
    """Yield openings at random times, each in a slot of its own."""
    at_s = 0.0
    while traffic.opens_per_s:
        at_s += chance.expovariate(traffic.opens_per_s)
        if at_s >= traffic.seconds:
            return
        rows = chance.randint(150, 2000)
        parts = (Part.FEED, rows), (Part.VOICE, 1)
        yield Task(slot, at_s, Open(slot, Rows(rows)), Kind.BACKGROUND, parts, CHAT_CONTEXT)
        slot += 1
