import random
from dataclasses import replace

import pytest
from support.paths import GOLDEN

from duplane.worker.models.minicpm_o.duplex.unit_state import (
    MAX_UNIT_CHARACTERS,
    TurnState,
    UnitState,
)
from duplane.worker.models.minicpm_o.llm.tokenizer import Tokens

TOKENS = Tokens.load(GOLDEN / "checkpoint")
WORD = TOKENS.encode(" last")[0]


def begin(turn: TurnState, *, force_listen: bool = False) -> UnitState:
    return UnitState(TOKENS, turn, force_listen or turn.must_listen)


def turn(*, is_open: bool = False, max_tokens: int = 20, force_listen_count: int = 0) -> TurnState:
    return TurnState(force_listen_count, max_tokens, is_open)


def advance_all(unit: UnitState, *chosen: int) -> list[int | None]:
    return [unit.advance(token) for token in chosen]


def test_listening_ends_the_unit_at_once() -> None:
    unit = begin(turn())
    assert unit.advance(TOKENS.listen) is None
    assert unit.is_over
    assert unit.is_listen
    assert unit.token_ids == [TOKENS.listen, TOKENS.unit_end]
    assert unit.closing_ids == (TOKENS.listen, TOKENS.unit_end)


def test_the_first_token_opens_the_turn_and_is_no_text() -> None:
    state = turn()
    unit = begin(state)
    assert advance_all(unit, TOKENS.speak, WORD, TOKENS.chunk_eos) == [TOKENS.speak, WORD, None]
    assert state.is_open
    assert unit.text_ids == [WORD]
    assert unit.token_ids == [TOKENS.speak, WORD, TOKENS.chunk_eos, TOKENS.unit_end]
    assert not unit.end_of_turn


def test_listen_inside_an_open_turn_becomes_the_start_of_speech() -> None:
    state = turn(is_open=True)
    unit = begin(state)
    assert unit.advance(TOKENS.listen) == TOKENS.tts_bos
    assert not unit.is_over
    assert state.is_open


def test_the_end_of_the_turn_is_a_text_id_and_closes_the_turn() -> None:
    state = turn(is_open=True)
    unit = begin(state)
    advance_all(unit, TOKENS.speak, WORD, TOKENS.turn_eos, TOKENS.chunk_eos)
    assert unit.end_of_turn
    assert not state.is_open
    assert unit.text_ids == [WORD, TOKENS.turn_eos]


def test_speech_after_the_end_of_a_turn_opens_another() -> None:
    state = turn()
    unit = begin(state)
    advance_all(unit, TOKENS.speak, TOKENS.turn_eos, WORD, TOKENS.chunk_eos)
    assert not unit.end_of_turn
    assert state.is_open


def test_listen_after_the_end_of_the_turn_makes_the_unit_a_listening_one() -> None:
    unit = begin(turn())
    advance_all(unit, TOKENS.speak, WORD, TOKENS.turn_eos, TOKENS.listen)
    assert unit.is_listen
    assert unit.closing_ids == (TOKENS.listen, TOKENS.unit_end)


def test_a_token_that_makes_the_text_too_long_is_dropped() -> None:
    unit = begin(turn())
    unit.advance(TOKENS.speak)
    while unit.advance(WORD) is not None:
        pass
    text = TOKENS.decode(unit.text_ids)
    assert len(text) < MAX_UNIT_CHARACTERS <= len(text + " last")
    assert unit.closing_ids == (TOKENS.chunk_eos, TOKENS.unit_end)
    assert not unit.is_listen


@pytest.mark.parametrize("most", [1, 2, 20])
def test_the_last_step_ends_the_unit_whatever_the_model_chooses(most: int) -> None:
    unit = begin(turn(max_tokens=most))
    special = TOKENS.tts_bos  # this id has no text, so only the count ends the unit
    fed = 0
    while unit.needs_choice:
        assert unit.advance(special) == special
        fed += 1
    assert fed == most - 1
    assert unit.advance(None) is None
    assert unit.closing_ids == (TOKENS.chunk_eos, TOKENS.unit_end)


def test_the_first_units_listen_without_a_choice_of_the_model() -> None:
    state = turn(force_listen_count=2)
    for _ in range(2):
        unit = begin(state)
        assert not unit.needs_choice
        assert unit.advance(None) is None
        assert unit.is_listen
    assert begin(state).needs_choice


def test_a_forced_listen_closes_the_open_turn_first() -> None:
    state = turn(is_open=True)
    unit = begin(state, force_listen=True)
    assert unit.interrupt() == TOKENS.turn_eos
    assert not state.is_open
    assert unit.advance(None) is None
    assert unit.token_ids == [TOKENS.turn_eos, TOKENS.listen, TOKENS.unit_end]
    assert unit.is_listen
    assert not unit.text_ids
    assert not unit.end_of_turn


def test_recorded_choices_give_the_same_unit_and_turn() -> None:
    """For random choices, `retraced` must reach the same state as `advance`."""
    numbers = random.Random(5)
    words = [TOKENS.encode(text)[0] for text in (" last", " a", "ing", " the")]
    choices = [*words * 2, TOKENS.listen, TOKENS.speak, TOKENS.turn_eos, TOKENS.eos, None]
    for _ in range(400):
        live = turn(max_tokens=numbers.choice((1, 2, 5, 20)), force_listen_count=1)
        past = replace(live)
        for _ in range(6):
            is_forced = numbers.random() < 0.1
            is_interrupting = is_forced and live.is_open
            unit = begin(live, force_listen=is_forced)
            if is_interrupting:
                unit.interrupt()
            chosen: list[int] = []
            while not unit.is_over:
                token = numbers.choice(choices) if unit.needs_choice else None
                # None stands for the end of the chunk. Half of the end-of-sequence ids are recorded
                # as choices. The other half stand for decisions of `listen_top_k`: not recorded.
                is_counted = token is not None and (token != TOKENS.eos or numbers.random() < 0.5)
                chosen += [token] if token is not None and is_counted else []
                unit.advance(TOKENS.chunk_eos if token is None else token)
            found = UnitState.retraced(
                TOKENS, past, unit.token_ids, chosen, is_interrupting=is_interrupting
            )
            assert found is not None
            assert replace(found, is_forced=False) == replace(unit, is_forced=False)
            assert past == live


def test_choices_that_do_not_give_the_ids_are_refused() -> None:
    ids = (TOKENS.speak, WORD, TOKENS.chunk_eos, TOKENS.unit_end)

    def retraced(*chosen: int, ids: tuple[int, ...] = ids) -> UnitState | None:
        return UnitState.retraced(TOKENS, turn(), ids, chosen, is_interrupting=False)

    assert retraced(TOKENS.speak, WORD)
    # A unit that really chose two words would have both of them in its ids.
    assert retraced(TOKENS.speak, WORD, WORD) is None
    assert retraced(TOKENS.speak) is None
    assert retraced(TOKENS.speak, WORD, ids=ids[:-1]) is None
    assert retraced(TOKENS.speak, WORD, ids=(*ids, WORD)) is None
    assert retraced(ids=()) is None
