"""The bytes with which a unit's change of state travels to the worker that rebuilds it.

The bytes are a version, then unsigned varints (LEB128, as in protobuf): flags, the number of draws,
the number of speech tokens and these tokens, the number of chosen ids and these ids. If the unit
has new requests to speak, then their count follows, and of each request its number, the number of
its ids and these ids. The limit of rows follows if there is one. Only workers with the same model
digest exchange them. Workers that know no requests or no limits refuse the flags of units with
them.
"""

from __future__ import annotations

from collections.abc import Sequence

from duplane.worker.models.types import MAX_SPEECH_REQUESTS, StateChange

VERSION = 1
MAX_IDS = 4096
"""Maximum number of ids of each type. A unit has fewer; this bounds the memory of a bad state."""
MAX_NUMBER = (1 << 32) - 1
_INTERRUPTED = 1  # flag: a forced listen has ended the turn
_WAS_REQUESTED = 2  # flag: the unit spoke a requested text
_ENDED_REQUESTS = 4  # flag: a forced listen has ended all earlier requests
_HAS_REQUESTS = 8  # flag: the unit has new requests
_HAS_LIMIT = 16  # flag: the context window made room because memory was short
_FLAGS = _INTERRUPTED | _WAS_REQUESTED | _ENDED_REQUESTS | _HAS_REQUESTS | _HAS_LIMIT
_MAX_NUMBER_BYTES = 5


class StateError(ValueError):
    """The bytes are not the state of a unit. The message says why."""


def encode(change: StateChange) -> bytes:
    """Return the bytes of a change of state."""
    flags = (
        _INTERRUPTED * change.interrupted_turn
        | _WAS_REQUESTED * change.was_requested
        | _ENDED_REQUESTS * change.ended_requests
        | _HAS_REQUESTS * bool(change.requests)
        | _HAS_LIMIT * bool(change.row_limit)
    )
    speech, chosen = change.speech_token_ids, change.chosen_token_ids
    numbers = [flags, change.draw_count, len(speech), *speech, len(chosen), *chosen]
    if change.requests:
        numbers.append(len(change.requests))
        for number, ids in change.requests:
            numbers += (number, len(ids), *ids)
    if change.row_limit:
        numbers.append(change.row_limit)
    state = bytearray((VERSION,))
    for number in numbers:
        while number > 0x7F:
            state.append(number & 0x7F | 0x80)
            number >>= 7
        state.append(number)
    return bytes(state)


def decode(state: bytes) -> StateChange:
    """Return the change of state that `encode` has encoded. Raises `StateError`."""
    if not state or state[0] != VERSION:
        version = state[0] if state else "absent"
        raise StateError(f"the version of the state is {version}, not {VERSION}")
    reader = _Reader(state)
    flags, draw_count = reader.number(), reader.number()
    if flags > _FLAGS:
        raise StateError(f"the state has unknown flags, {flags}")
    speech, chosen = reader.ids(), reader.ids()
    requests = reader.requests() if flags & _HAS_REQUESTS else ()
    row_limit = reader.number() if flags & _HAS_LIMIT else 0
    reader.check_end()
    return StateChange(
        tuple(speech),
        tuple(chosen),
        draw_count,
        interrupted_turn=bool(flags & _INTERRUPTED),
        was_requested=bool(flags & _WAS_REQUESTED),
        ended_requests=bool(flags & _ENDED_REQUESTS),
        requests=requests,
        row_limit=row_limit,
    )


class _Reader:
    """Reads the numbers of a state, from the byte after the version on."""

    def __init__(self, state: bytes) -> None:
        self._state, self._place = state, 1

    def number(self) -> int:
        found = 0
        for index in range(_MAX_NUMBER_BYTES):
            if self._place == len(self._state):
                raise StateError("the state is cut off")
            byte = self._state[self._place]
            self._place += 1
            found |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                break
        else:
            raise StateError("the state has a number of too many bytes")
        if found > MAX_NUMBER:
            raise StateError(f"the state has a number above {MAX_NUMBER}")
        return found

    def ids(self) -> Sequence[int]:
        count = self.number()
        if count > MAX_IDS:
            raise StateError(f"the state has {count} ids of one type, more than {MAX_IDS}")
        return [self.number() for _ in range(count)]

    def requests(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        count = self.number()
        if not 1 <= count <= MAX_SPEECH_REQUESTS:
            raise StateError(f"the state has {count} requests, not 1 to {MAX_SPEECH_REQUESTS}")
        return tuple((self.number(), tuple(self.ids())) for _ in range(count))

    def check_end(self) -> None:
        if self._place < len(self._state):
            raise StateError(f"the state has {len(self._state) - self._place} bytes too many")
