"""Dialect L: every event that it sends is one of OpenAI's, and no other event is answered."""

from __future__ import annotations

import orjson
import pytest
from support.client_packages import checked_kinds, needs_python_clients
from support.protocols.specifications import corpus

from duplane.edge.client_errors import RESUME_CODES, ClientError, ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.close import Close, CloseReason
from duplane.edge.dialects.dialect import Phase
from duplane.edge.dialects.l import UNSUPPORTED, DialectL
from duplane.edge.dialects.openai_errors import ERRORS
from duplane.edge.identity import Identity
from duplane.edge.modes import LIVE_MODE
from duplane.edge.payload.fields import Fields
from duplane.edge.settings import Limits


def dialect(phase: Phase = Phase.ACTIVE) -> DialectL:
    client = DialectL(Identity("sess_0123456789ab", "rt_0"), Limits(), LIVE_MODE)
    client.phase = phase
    return client


@pytest.mark.slow
@needs_python_clients
async def test_every_event_is_one_of_openai() -> None:
    moves = [move for replay in corpus("L").replays for move in replay.moves]
    events = [orjson.dumps(event) for move in moves for event in move.told]
    kinds = await checked_kinds("live", events)
    assert set(kinds["server"]) == set(DialectL.server_events)
    known = {name for _, name in DialectL.transitions} | UNSUPPORTED
    assert kinds["client"]
    assert known >= set(kinds["client"])


@pytest.mark.parametrize("phase", [Phase.START, Phase.OPENING, Phase.ACTIVE])
@pytest.mark.parametrize("kind", sorted(UNSUPPORTED))
def test_an_event_for_an_ability_that_is_lacking_is_refused(kind: str, phase: Phase) -> None:
    with pytest.raises(ClientError) as refusal:
        dialect(phase).decode(Fields({"type": kind, "event_id": "mine"}))
    assert refusal.value.code is ErrorCode.UNSUPPORTED
    told = orjson.loads(
        dialect().error(refusal.value.code, refusal.value.message, Moment(0.0, 0), "mine")
    )
    assert told["error"]["code"] == "unsupported"
    assert told["error"]["client_event_id"] == told["client_event_id"] == "mine"


def test_every_error_of_the_edge_has_a_code_of_openai() -> None:
    assert set(ERRORS) == set(ErrorCode) - RESUME_CODES  # no client of OpenAI returns


def test_an_ended_credential_is_told_as_what_it_is() -> None:
    client = dialect()
    close = Close(CloseReason.CREDENTIAL_ENDED, "the key is revoked")
    (told,) = map(orjson.loads, client.ended(close, Moment(0.0, 0)))
    error = told["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert error["message"] == "the key is revoked"
    assert client.close_code(close) == 1008


@pytest.mark.parametrize("given", [7, "x" * 257, None, ["x"]])
def test_an_invalid_event_id_is_not_repeated(given: object) -> None:
    with pytest.raises(ClientError) as refusal:
        dialect().decode(Fields({"type": "unheard.of", "event_id": given}))
    assert refusal.value.input_id is None


def test_instructions_and_input_have_one_bound() -> None:
    item = {"role": "user", "content": [{"text": "é" * 100}]}
    session = {"model": "m", "input": [item] * 3, "instructions": "x" * 1000}
    client = DialectL(Identity("s", "r"), Limits(instructions_bytes=1500), LIVE_MODE)
    with pytest.raises(ClientError, match=r"session.input: must be at most 1500 bytes"):
        client.decode(Fields({"type": "session.start", "session": session}))
    client.decode(Fields({"type": "session.start", "session": {**session, "input": [item] * 2}}))


def test_a_client_waits_twenty_seconds_in_the_queue() -> None:
    assert dialect().queue_s == Limits().openai_queue_s == 20
