from pathlib import Path

import pytest

from duplane.worker.model.duplex import MAX_UNIT_CHARACTERS, TurnState, UnitRules
from duplane.worker.model.tokens import Tokens

TOKENS = Tokens.load(Path(__file__).parents[1] / "golden" / "public" / "checkpoint")
WORD = TOKENS.encode(" last")[0]


def begin(turn: TurnState, *, force_listen: bool = False) -> UnitRules:
    return UnitRules.begin(TOKENS, turn, force_listen=force_listen)


def turn(*, is_open: bool = False, max_tokens: int = 20, force_listen_count: int = 0) -> TurnState:
    return TurnState(force_listen_count, max_tokens, is_open)


def take_all(rules: UnitRules, *chosen: int) -> list[int | None]:
    return [rules.take(token) for token in chosen]


def test_listening_ends_the_unit_at_once() -> None:
    rules = begin(turn())
    assert rules.take(TOKENS.listen) is None
    assert rules.is_over
    assert rules.is_listen
    assert rules.added == [TOKENS.listen, TOKENS.unit_end]
    assert rules.closing() == (TOKENS.listen, TOKENS.unit_end)


def test_the_first_token_opens_the_turn_and_is_not_said() -> None:
    state = turn()
    rules = begin(state)
    assert take_all(rules, TOKENS.speak, WORD, TOKENS.chunk_eos) == [TOKENS.speak, WORD, None]
    assert state.is_open
    assert rules.said == [WORD]
    assert rules.added == [TOKENS.speak, WORD, TOKENS.chunk_eos, TOKENS.unit_end]
    assert not rules.end_of_turn


def test_listen_inside_an_open_turn_becomes_the_start_of_speech() -> None:
    state = turn(is_open=True)
    rules = begin(state)
    assert rules.take(TOKENS.listen) == TOKENS.tts_bos
    assert not rules.is_over
    assert state.is_open


def test_the_end_of_the_turn_is_said_and_closes_the_turn() -> None:
    state = turn(is_open=True)
    rules = begin(state)
    take_all(rules, TOKENS.speak, WORD, TOKENS.turn_eos, TOKENS.chunk_eos)
    assert rules.end_of_turn
    assert not state.is_open
    assert rules.said == [WORD, TOKENS.turn_eos]


def test_speech_after_the_end_of_a_turn_opens_another() -> None:
    state = turn()
    rules = begin(state)
    take_all(rules, TOKENS.speak, TOKENS.turn_eos, WORD, TOKENS.chunk_eos)
    assert not rules.end_of_turn
    assert state.is_open


def test_listen_after_the_end_of_the_turn_makes_the_unit_a_listening_one() -> None:
    rules = begin(turn())
    take_all(rules, TOKENS.speak, WORD, TOKENS.turn_eos, TOKENS.listen)
    assert rules.is_listen
    assert rules.closing() == (TOKENS.listen, TOKENS.unit_end)


def test_a_token_that_makes_the_text_too_long_is_dropped() -> None:
    rules = begin(turn())
    rules.take(TOKENS.speak)
    while rules.take(WORD) is not None:
        pass
    text = TOKENS.decode(rules.said)
    assert len(text) < MAX_UNIT_CHARACTERS <= len(text + " last")
    assert rules.closing() == (TOKENS.chunk_eos, TOKENS.unit_end)
    assert not rules.is_listen


@pytest.mark.parametrize("most", [1, 2, 20])
def test_the_last_step_ends_the_unit_whatever_the_model_wants(most: int) -> None:
    rules = begin(turn(max_tokens=most))
    special = TOKENS.tts_bos  # has no text, so only the count ends the unit
    fed = 0
    while rules.wants_choice:
        assert rules.take(special) == special
        fed += 1
    assert fed == most - 1
    assert rules.take(None) is None
    assert rules.closing() == (TOKENS.chunk_eos, TOKENS.unit_end)


def test_the_first_units_listen_without_asking_the_model() -> None:
    state = turn(force_listen_count=2)
    for _ in range(2):
        rules = begin(state)
        assert not rules.wants_choice
        assert rules.take(None) is None
        assert rules.is_listen
    assert begin(state).wants_choice


def test_a_forced_listen_closes_the_open_turn_first() -> None:
    state = turn(is_open=True)
    rules = begin(state, force_listen=True)
    assert rules.interrupt() == TOKENS.turn_eos
    assert not state.is_open
    assert rules.take(None) is None
    assert rules.added == [TOKENS.turn_eos, TOKENS.listen, TOKENS.unit_end]
    assert rules.is_listen
    assert not rules.said
    assert not rules.end_of_turn
