"""Any legal sequence of launches gives each conversation and chat what it gets alone."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.paths import GOLDEN
from support.speech import assert_sounds_equal

from duplane.tools.golden_replay.audio import read_audio, read_clip
from duplane.worker.engine.schedule import Block, Kind, Work
from duplane.worker.models.chat import (
    ChatAudio,
    ChatImage,
    ChatMessage,
    ChatOptions,
    ChatOutput,
    ChatRequest,
    ChatRole,
)
from duplane.worker.models.interface import (
    Continue,
    Item,
    Open,
    Result,
    RunUnit,
    StartChat,
    Unfinished,
)
from duplane.worker.models.minicpm_o.batch_isolation import STAGE_FAILED
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.worker_model import WorkerModel
from duplane.worker.models.types import (
    ConversationOptions,
    DecodeMode,
    Unit,
    UnitFailure,
    UnitOutput,
    WindowMode,
)

UNIT = 16_000
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 12 * UNIT)
PICTURES = [(GOLDEN / "images" / name).read_bytes() for name in ("big.png", "wide.png")]
SAMPLED = ConversationOptions(seed=1, force_listen_count=0, temperature=0.9)
MOVING = replace(
    SAMPLED,
    seed=2,
    sliding_window_mode=WindowMode.CONTEXT,
    context_max_units=1,
    context_previous_max_tokens=9,
)
SEEING = replace(SAMPLED, seed=3, decode_mode=DecodeMode.GREEDY)
CHAT = ChatRequest(
    (
        ChatMessage(
            ChatRole.USER,
            (
                ChatImage(PICTURES[0]),
                ChatAudio(read_clip(GOLDEN / "audio" / "user.wav")),
                ChatImage(PICTURES[1]),
                "Go on.",
            ),
        ),
    ),
    ChatOptions(seed=4, temperature=1.1, max_new_tokens=24, generate_audio=True, max_slices=2),
)


@dataclass(frozen=True)
class Plan:
    """A conversation with units from a second of the recording on. Without options it is a chat."""

    options: ConversationOptions | None = None
    second: int = 0
    has_pictures: bool = False

    def items(self, model: DuplexModel, slot: int) -> list[Item]:
        """Return the items that begin the work of the plan."""
        if self.options is None:
            return [StartChat(slot, model.preparer.chat(CHAT, lambda: None))]
        items: list[Item] = [Open(slot, model.preparer.conversation(self.options))]
        for number in range(UNITS):
            audio = TALK[(self.second + number) * UNIT :][:UNIT]
            frames = tuple(PICTURES[:1]) if self.has_pictures and number == 1 else ()
            unit = model.preparer.unit(Unit(slot, audio, number == 3, frames, 2))
            assert isinstance(unit, Unit)
            items.append(RunUnit(unit))
        return items


UNITS = 5
SPEECH = (Block.TALK, Block.VOCODE, Block.VOICE)
ALONE = (Block.OPEN, Block.SETTLE, Block.VOICE)
PLANS = (Plan(SAMPLED, 3), Plan(MOVING, 1), Plan(SEEING, 5, has_pictures=True), Plan())
Played = dict[int, list[Any]]
"""The outputs and failures of each plan."""


class Player:
    """Runs plans, each in its slot, through the seam. `draw` chooses launches and their sizes.

    Without `draw`, each launch has all that it can have. With two lanes, launches of both run at
    the same time.
    """

    def __init__(
        self,
        model: DuplexModel,
        plans: Mapping[int, Plan],
        draw: random.Random | None,
        lanes: int = 1,
    ) -> None:
        self._worker, self._draw, self._lanes = WorkerModel(model), draw, lanes
        self._next = {slot: deque(plan.items(model, slot)) for slot, plan in plans.items()}
        self._left: dict[int, Unfinished] = {}
        self.played: Played = defaultdict(list)

    def run(self) -> Played:
        """Run until no slot has work."""
        with ThreadPoolExecutor(self._lanes) as pool:
            while launches := self._launches():
                for results in pool.map(self._advance, self._chosen(launches)):
                    for result in results:
                        self._keep(result)
        return self.played

    def _advance(self, items: Sequence[Item]) -> list[Result]:
        return list(self._worker.advance(items))

    def _launches(self) -> dict[Block, list[Item]]:
        """Return the items that may run, by their block."""
        found: dict[Block, list[Item]] = defaultdict(list)
        for slot, items in self._next.items():
            if left := self._left.get(slot):
                rows = self._draw.randint(1, min(left.rows, 60)) if self._draw else left.rows
                item = Continue(slot, left.part, rows)
            elif items:
                item = items[0]
            else:
                continue
            found[Work(item, Kind.UNIT, 0.0).block].append(item)
        return found

    def _chosen(self, launches: dict[Block, list[Item]]) -> list[list[Item]]:
        """Return the items of one launch, or of one in each lane."""
        blocks = sorted(launches, key=lambda block: block.value)
        first = self._draw.choice(blocks) if self._draw else blocks[0]
        chosen = [first]
        if self._draw and self._lanes > 1 and not first.is_shared:
            others = [
                block
                for block in blocks
                if (block in SPEECH) != (first in SPEECH) and not block.is_shared
            ]
            chosen += self._draw.sample(others, min(1, len(others)))
        return [self._some(launches[block], block) for block in chosen]

    def _some(self, items: list[Item], block: Block) -> list[Item]:
        if self._draw is not None:
            items = self._draw.sample(items, self._draw.randint(1, len(items)))
        items = items[:1] if block in ALONE else items
        for item in items:
            if self._left.pop(item.slot, None) is None:
                self._next[item.slot].popleft()
        return items

    def _keep(self, result: Result) -> None:
        if isinstance(result, Unfinished):
            self._left[result.slot] = result
        elif isinstance(result, UnitOutput | ChatOutput | UnitFailure):
            self.played[result.slot].append(result)
        if isinstance(result, UnitFailure):
            self._next[result.slot].clear()


def play(
    model: DuplexModel, plans: Mapping[int, Plan], draw: random.Random | None, lanes: int = 1
) -> Played:
    played = Player(model, plans, draw, lanes).run()
    for slot in plans:
        model.close(slot)
        assert model.is_clean(slot)
    return played


@pytest.fixture(scope="module")
def alone(_loaded: DuplexModel) -> list[list[Any]]:
    """Return what each plan gets alone, in whole parts."""
    found = [play(_loaded, {1: plan}, None)[1] for plan in PLANS]
    for results in found[:3]:
        assert [type(result) for result in results] == [UnitOutput] * UNITS
        assert any(result.audio_token_count for result in results)
    assert sum(len(output.audio) for output in found[3])
    assert found[3][-1].finish
    return found


def assert_same(got: list[Any], want: list[Any]) -> None:
    """Compare the outputs of a unit, or of a whole chat."""
    assert [output.token_ids for output in got] == [output.token_ids for output in want]
    assert [output.text for output in got] == [output.text for output in want]
    for ours, theirs in zip(got, want, strict=True):
        assert ours.context_length == theirs.context_length
        assert ours.audio_token_count == theirs.audio_token_count
        assert_sounds_equal(ours.audio, theirs.audio)
        assert getattr(ours, "change", None) == getattr(theirs, "change", None)


@pytest.mark.parametrize(("seed", "lanes"), [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_any_sequence_of_launches_gives_what_each_gets_alone(
    model: DuplexModel, alone: list[list[Any]], seed: int, lanes: int
) -> None:
    draw = random.Random(seed)
    slots = draw.sample(range(len(PLANS)), len(PLANS))
    played = play(model, dict(zip(slots, PLANS, strict=True)), draw, lanes)
    for slot, want in zip(slots, alone, strict=True):
        assert_same(played[slot], want)


@pytest.mark.parametrize(("seed", "lanes"), [(4, 1), (5, 2)])
def test_slots_that_borrow_memory_get_what_each_gets_alone(
    lending: DuplexModel, alone: list[list[Any]], seed: int, lanes: int
) -> None:
    played = play(lending, dict(enumerate(PLANS)), random.Random(seed), lanes)
    pages = lending.llm.cache.pages
    for slot, want in enumerate(alone):
        assert_same(played[slot], want)
    longest = [max(output.context_length for output in outputs) for outputs in alone]
    assert max(longest) > pages.reserved * pages.page_rows


Failing = Callable[[Any], bool]
PLACES: dict[str, Callable[[DuplexModel, int], tuple[object, str, Failing]]] = {
    "audio": lambda m, slot: (m.parts.audio, "encode", lambda slots: slot in slots),
    "pass": lambda m, slot: (m.llm, "feed", lambda counts: slot in dict(counts)),
    "talker": lambda m, slot: (
        m.parts.talker,
        "draw",
        lambda requests: slot in {request.slot for request in requests},
    ),
    "flow": lambda m, slot: (
        m.parts.vocoder,
        "encode",
        lambda chunks: slot in {chunk.slot for chunk in chunks},
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_fails_for_one_amid_others_changes_nothing_for_these(
    model: DuplexModel, alone: list[list[Any]], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    draw = random.Random(place)
    owner, name, is_chosen = PLACES[place](model, 0)
    call, calls = getattr(owner, name), 0

    def failing(given: Any, *more: Any) -> Any:
        nonlocal calls
        calls += is_chosen(given)
        if is_chosen(given) and calls > 2:
            raise RuntimeError("the device says no")
        return call(given, *more)

    monkeypatch.setattr(owner, name, failing)
    played = play(model, dict(enumerate(PLANS)), draw)
    last = played[0][-1]
    assert isinstance(last, UnitFailure)
    assert (last.reason, last.is_fatal) == (STAGE_FAILED, True)
    for slot in range(1, len(PLANS)):
        assert_same(played[slot], alone[slot])
