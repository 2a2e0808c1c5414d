from dataclasses import replace
from typing import Any

import pytest
from support.paths import GOLDEN

from duplane.worker.models.minicpm_o.checkpoint import CheckpointError
from duplane.worker.models.minicpm_o.duplex.context_window import PREVIOUS_MARK, Window
from duplane.worker.models.minicpm_o.duplex.unit_state import UnitRecord
from duplane.worker.models.minicpm_o.llm.kv_cache import Slide
from duplane.worker.models.minicpm_o.llm.tokenizer import Tokens
from duplane.worker.models.minicpm_o.preparer_parts import window_rules
from duplane.worker.models.minicpm_o.types import WindowRules
from duplane.worker.models.types import ConversationOptions, OptionError, WindowMode

TOKENS = Tokens.load(GOLDEN / "checkpoint")
MARK = tuple(TOKENS.encode(PREVIOUS_MARK))
WORDS = tuple(TOKENS.encode(" many words were spoken here"))
TAIL = tuple(TOKENS.encode("<|audio_end|><|im_end|>"))
HEAD_ROWS = 40
BASIC = WindowRules(WindowMode.BASIC, basic_window_high_tokens=100, basic_window_low_tokens=80)
CONTEXT = WindowRules(WindowMode.CONTEXT, context_max_units=2, context_previous_max_tokens=4)


def window(rules: WindowRules, *units: tuple[int, ...] | None, rows: int = 13) -> Window:
    """Return a window over units. Each unit has its spoken ids, or None if the model listens."""
    found = Window(rules, TOKENS, HEAD_ROWS, TAIL)
    for number, ids in enumerate(units):
        found.units.append(UnitRecord(number, rows, ids is None, ids or ()))
    return found


def numbers(of: Window) -> list[int]:
    return [unit.number for unit in of.units]


def test_nothing_is_dropped_where_the_window_is_off() -> None:
    off = window(WindowRules(), *[None] * 500)
    assert off.slide() is None
    assert off.slide(limit=50) is None
    assert off.length == 42 + 500 * 13


def test_basic_waits_for_the_high_mark_and_drops_to_the_low_one() -> None:
    four = window(BASIC, None, None, None, None)
    assert four.length == 94
    assert four.slide() is None
    five = window(BASIC, None, None, None, None, None)
    assert five.slide() == Slide(kept=42 + 39, target=42, start=42)
    assert numbers(five) == [3, 4]
    assert five.length == 68


def test_the_prompt_stays_where_the_low_mark_is_below_it() -> None:
    all_gone = window(replace(BASIC, basic_window_low_tokens=1), *[WORDS] * 6)
    assert all_gone.slide() == Slide(kept=42 + 78, target=42, start=42)
    assert all_gone.length == 42
    assert all_gone.slide() is None


def test_context_keeps_a_number_of_units() -> None:
    listened = window(CONTEXT, None, None, None)
    assert listened.slide() == Slide(kept=55, target=42, start=42)
    assert numbers(listened) == [1, 2]
    assert listened.previous == ()
    assert listened.slide() is None


def test_what_was_said_stays_behind_the_marker_without_special_tokens() -> None:
    said = (TOKENS.turn_eos, *WORDS[:2], TOKENS.eos)
    spoken = window(CONTEXT, said, None, None)
    expected = (*MARK, *WORDS[:2])
    rows = 42 + len(expected)
    assert spoken.slide() == Slide(55, rows, HEAD_ROWS, (*expected, *TAIL))
    assert spoken.previous == expected
    assert spoken.preserved_rows == rows


def test_only_what_is_new_is_fed_again() -> None:
    spoken = window(CONTEXT, WORDS[:2], WORDS[2:3], None, None)
    spoken.rules = replace(CONTEXT, context_max_units=3)
    first = spoken.slide()
    assert first is not None
    spoken.rules = CONTEXT
    second = spoken.slide()
    assert second is not None
    assert second.start == HEAD_ROWS + len(MARK) + 2
    assert second.ids == (WORDS[2], *TAIL)
    assert spoken.previous == (*MARK, *WORDS[:3])


def test_the_oldest_words_go_and_the_marker_stays() -> None:
    spoken = window(CONTEXT, WORDS[:3], WORDS[3:6], None, None)
    spoken.slide()
    assert spoken.previous == (*MARK, *WORDS[2:6])
    forgetful = window(replace(CONTEXT, context_previous_max_tokens=0), WORDS, None, None)
    forgetful.slide()
    assert forgetful.previous == MARK


def test_words_of_a_unit_that_listened_after_all_are_not_kept() -> None:
    lost = window(CONTEXT, None, None, None)
    lost.units[0] = UnitRecord(0, 15, True, WORDS[:2])
    lost.slide()
    assert lost.previous == ()


@pytest.mark.parametrize("rules", [BASIC, CONTEXT])
@pytest.mark.parametrize("limit", [95, 70, 60, 1])
def test_it_makes_room_until_there_is_nothing_left_to_drop(rules: WindowRules, limit: int) -> None:
    generous = replace(rules, basic_window_high_tokens=10**6, context_max_units=1000)
    full = window(generous, *[WORDS[:2]] * 6)
    while full.slide(limit):
        assert full.length >= full.preserved_rows
    assert full.length <= limit or not full.units
    assert full.preserved_rows <= 42 + len(MARK) + 4


def test_what_a_conversation_does_not_say_is_the_checkpoints() -> None:
    ours = window_rules(
        {"sliding_window_mode": "basic", "basic_window_high_tokens": 230, "temperature": 0.7}
        | {"basic_window_low_tokens": 160}
    )
    assert ours == WindowRules(WindowMode.BASIC, 230, 160)
    assert ours.chosen(ConversationOptions(), 8192) == ours
    chosen = ours.chosen(
        ConversationOptions(sliding_window_mode=WindowMode.OFF, context_max_units=3), 8192
    )
    assert chosen == WindowRules(WindowMode.OFF, 230, 160, context_max_units=3)
    assert window_rules({}) == WindowRules(WindowMode.OFF, 4000, 3500, 24, 500)


def test_words_leave_room_for_units_in_a_small_context() -> None:
    assert WindowRules().chosen(ConversationOptions(), 512).context_previous_max_tokens == 128


def test_a_low_mark_above_the_high_one_is_refused() -> None:
    with pytest.raises(OptionError, match="basic_window_low_tokens is 3500"):
        WindowRules().chosen(ConversationOptions(basic_window_high_tokens=3000), 8192)


@pytest.mark.parametrize(
    "config",
    [
        {"sliding_window_mode": "other"},
        {"sliding_window_mode": 1},
        {"basic_window_high_tokens": 100},
        {"context_max_units": 0},
        {"context_previous_max_tokens": "500"},
    ],
)
def test_generation_settings_that_cannot_be_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        window_rules(config)
