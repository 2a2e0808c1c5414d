"""Dialect E before the sound of a client flows to a model, and with manual turns: kind chat.

A session of E holds no slot until its first events decide its kind. With `turn_detection` null, or
if it asks for a response before it sends sound, it has turns of chat: each response gets a slot of
its own, and reads the items so far. Sound that is appended under a turn detection of the model
makes it a duplex session for the rest of its life. Under such a turn detection, many clients ask
for a response when they connect. If there is no question and no instruction for it, it is empty.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

from duplane.edge.client_errors import ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.close import Close
from duplane.edge.dialects.actions import Action, Append, CancelTurn, Command, Turn
from duplane.edge.dialects.chat import ChatDialect
from duplane.edge.dialects.dialect import ALIVE, Decoders, Phase, Replies, ServerEvents, Transitions
from duplane.edge.dialects.duplex import DuplexDialect
from duplane.edge.dialects.e import DialectE
from duplane.edge.dialects.e_commands import (
    APPEND,
    CANCEL,
    CLEAR,
    COMMIT,
    CREATE_ITEM,
    CREATE_RESPONSE,
    DELETE,
    Cancel,
    CreateItem,
    CreateResponse,
    ItemCommand,
    read_request,
)
from duplane.edge.dialects.e_history import History, Media
from duplane.edge.dialects.e_input import InputBuffer, UnheardSound, read_media
from duplane.edge.dialects.e_items import Item, read_item
from duplane.edge.dialects.e_realtime import ANSWERS, COMMANDS, RealtimeDialect
from duplane.edge.dialects.e_response import (
    CLIENT_CANCELLED,
    COMPLETED,
    FULL,
    End,
    ResponseRequest,
    Status,
)
from duplane.edge.dialects.e_settings import TEXT
from duplane.edge.dialects.openai_errors import (
    COMMIT_EMPTY,
    CONTEXT_TOO_LONG,
    ERRORS,
    named_error,
)
from duplane.edge.dialects.openai_settings import DEFAULT_PROMPT
from duplane.edge.identity import Identity
from duplane.edge.modes import REALTIME_MODE, Mode
from duplane.edge.payload.fields import Fields, invalid
from duplane.edge.payload.rates import INPUT_RATE_HERTZ
from duplane.edge.settings import Limits
from duplane.fabric.audio import SAMPLE_BYTES
from duplane.fabric.v1 import session_pb2

_MIN_COMMIT_S = 0.1  # OpenAI's own bound
_MAX_INPUT_ITEMS = 256
# Of a response without a bound of its own. If the model decides about turns, it does not hear the
# user before the response ends.
_MAX_TOKEN_COUNT, _MAX_GREETING_TOKEN_COUNT = 2048, 256
# What a turn of chat has in dialect D.
_TEMPERATURE, _TOP_P, _LENGTH_PENALTY = 0.7, 0.8, 1.0
_REFERENCE = "item_reference"
_ONE_MESSAGE = re.compile(r"messages\[")  # begins an error about one message
_ENDS: Mapping[int, End] = {
    session_pb2.FINISH_REASON_LENGTH: FULL,
    session_pb2.FINISH_REASON_CONTEXT_FULL: End(
        Status.FAILED, error=named_error(CONTEXT_TOO_LONG, "The context of the model is full.")
    ),
}


@dataclass(frozen=True, slots=True)
class ResponseTurn(Turn):
    """The turn that a `response.create` asks for."""

    response: ResponseRequest | None = None


@dataclass(frozen=True, slots=True)
class CreateMediaItem(CreateItem):
    """Add an item with its sounds and pictures."""

    media: Media = ()


class CreateSecondResponse(CreateResponse):
    """A `response.create` that is refused: a response was open when it was decoded.

    The response may have ended since then, as a thread decodes a long event.
    """


class DialectEChat(RealtimeDialect, ChatDialect):
    """One client that speaks E, as long as it has no conversation with a duplex model."""

    begins_with_slot: ClassVar[bool] = False
    takes_sound: ClassVar[bool] = True
    transitions: ClassVar[Transitions] = {
        (Phase.START, kind): Phase.START for kind in (APPEND, *COMMANDS)
    }
    replies: ClassVar[Replies] = {APPEND: (), **ANSWERS}
    server_events: ClassVar[ServerEvents] = dict.fromkeys(DialectE.server_events, ALIVE)

    def __init__(self, identity: Identity, limits: Limits, mode: Mode) -> None:
        super().__init__(identity, limits, mode)
        self._history = History(self._conversation.items, limits)
        self._input = InputBuffer()
        self._unheard = UnheardSound(limits.early_unit_count)

    def _use_formats(self) -> None:
        """Read sound as the settings say. A response keeps the format with which it has begun."""
        settings = self._conversation.settings
        self.input_sound = settings.input_sound
        if self._conversation.response is None:
            self.output_sound = settings.output_sound

    @property
    def held_bytes(self) -> int:
        """The bytes of the client's sounds and pictures that the edge keeps."""
        buffered_bytes = int(self._input.seconds * INPUT_RATE_HERTZ) * SAMPLE_BYTES
        return self._history.media_bytes + buffered_bytes + self._unheard.byte_count

    @property
    def takes_turns(self) -> bool:
        """Whether a turn may begin now: at any time, since each turn has all its settings."""
        return True

    @property
    def _is_manual(self) -> bool:
        """Whether the client says where its turns end."""
        return self._conversation.settings.turn_detection.is_manual

    # --- client events ---

    def _event_decoders(self) -> Decoders:
        return {
            **super()._event_decoders(),
            CREATE_ITEM: self._decode_item,
            CREATE_RESPONSE: self._decode_response,
            CANCEL: self._decode_cancel,
        }

    def _decode_append(self, event: Fields) -> Append:
        append = super()._decode_append(event)
        added_s = len(append.audio) / (SAMPLE_BYTES * append.rate_hertz)
        max_s = min(
            self.limits.chat_audio_s,
            self.limits.chat_media_bytes / (SAMPLE_BYTES * INPUT_RATE_HERTZ),
        )
        if self._is_manual and self._input.seconds + added_s > max_s:
            raise invalid("audio", f"brings the buffer to more than {max_s:g} s")
        return append

    def _decode_item(self, event: Fields) -> CreateMediaItem:
        item, media = self._read_item(event.required_fields("item"))
        after = event.text("previous_item_id", self.limits.text_bytes)
        return CreateMediaItem(
            CREATE_ITEM, self._input_id(event), item=item, after=after, media=media
        )

    def _read_item(self, fields: Fields) -> tuple[Item, Media]:
        item = read_item(fields, self.limits)
        is_message = item.role == "user"
        return item, read_media(fields, self.input_sound, self.limits) if is_message else ()

    def _decode_response(self, event: Fields) -> Action:
        given = event.fields("response") or Fields({}, "response")
        request = read_request(given)
        input_id = self._input_id(event)
        if self._conversation.response:
            return CreateSecondResponse(CREATE_RESPONSE, input_id, request=request)
        settings = self._conversation.settings
        instructions = given.text("instructions", self.limits.instructions_bytes)
        prompt = settings.instructions if instructions is None else instructions
        prompt = prompt if prompt.strip() else DEFAULT_PROMPT
        items = given.items("input", _MAX_INPUT_ITEMS)
        messages = (
            self._history.messages(prompt)
            if items is None
            else self._history.chosen(prompt, self._read_input(items, given.path("input")))
        )
        has_question = messages[-1].role == session_pb2.CHAT_ROLE_USER
        if items is None and not (self._is_manual or has_question or instructions):
            return CreateResponse(CREATE_RESPONSE, input_id, request=request)
        bound = request.max_output_tokens or settings.max_output_tokens
        config = session_pb2.ChatConfig(
            max_new_token_count=bound if isinstance(bound, int) else self._max_token_count,
            temperature=_TEMPERATURE,
            top_p=_TOP_P,
            length_penalty=_LENGTH_PENALTY,
            generate_audio=(request.modalities or settings.modalities) != TEXT,
            use_image_id=True,
        )
        turn = session_pb2.ChatRequest(messages=messages, config=config)
        return ResponseTurn(turn, input_id=input_id, kind=CREATE_RESPONSE, response=request)

    @property
    def _max_token_count(self) -> int:
        count = _MAX_TOKEN_COUNT if self._is_manual else _MAX_GREETING_TOKEN_COUNT
        return min(count, self.limits.chat_token_count)

    def _read_input(self, items: list[object], path: str) -> Iterator[tuple[Item, Media]]:
        """Return the items that a response reads instead of the conversation."""
        left_bytes = self.limits.chat_media_bytes
        for number, given in enumerate(items):
            item_path = f"{path}[{number}]"
            if not isinstance(given, dict):
                raise invalid(item_path, "must be an object")
            fields = Fields(cast("dict[str, object]", given), item_path)
            if fields.get("type", object) == _REFERENCE:
                item_id = fields.required_text("id", self.limits.text_bytes)
                item = self._conversation.items.get(item_id)
                if item is None:
                    raise invalid(fields.path("id"), "there is no such item")
                media = self._history.media(item_id)
            else:
                item, media = self._read_item(fields)
            left_bytes -= sum(map(len, media))
            if left_bytes < 0:
                fault = f"brings the media to more than {self.limits.chat_media_bytes} bytes"
                raise invalid(item_path, fault)
            yield item, media

    def _decode_cancel(self, event: Fields) -> Action:
        response_id = event.text("response_id", self.limits.text_bytes)
        response = self._conversation.response
        if response is None or response_id not in (None, response.id):
            return Cancel(CANCEL, self._input_id(event), response_id=response_id)
        return CancelTurn(CANCEL, self._input_id(event))

    def appended(self, append: Append) -> list[bytes]:
        """Keep the sound for the next commit, or for the duplex session that follows a turn."""
        buffer = self._input if self._is_manual else self._unheard
        buffer.add(append.audio, append.rate_hertz)
        return super().appended(append)

    def continuation(self, append: Append) -> tuple[DuplexDialect, tuple[Action, ...]] | None:
        """Return the dialect that goes on if the model decides about turns, and its first sound."""
        if self._is_manual or not append.audio:
            return None
        dialect = DialectE(self.identity, self.limits, REALTIME_MODE, self._conversation)
        dialect.new_scorer = self.new_scorer
        unheard = self._unheard.take() if self._unheard.rate_hertz == append.rate_hertz else b""
        self._history.clear()  # the caller may keep this dialect as long as the connection
        self._input.clear()
        before = Append(unheard, kind=APPEND, rate_hertz=append.rate_hertz)
        return dialect, (before, append) if unheard else (append,)

    def answer(self, command: Command, now: Moment) -> list[bytes]:
        """Apply a command, and render its answer."""
        conversation = self._conversation
        match command:
            case CreateMediaItem(item=item):
                if not item.id:
                    item = dataclasses.replace(item, id=conversation.events.new_id("item"))
                    command = dataclasses.replace(command, item=item)
                events = conversation.change_items(command)
                self._history.keep(item.id, command.media)
                return events
            case CreateSecondResponse():
                return [conversation.already_active(command.input_id)]
            case CreateResponse():
                return conversation.empty_response(command.request)
            case Cancel():
                return [conversation.not_active(command.input_id)]
            case _:
                pass
        if command.kind == COMMIT and self._is_manual:
            return self._commit(command)
        if command.kind == CLEAR:
            self._input.clear()
        elif isinstance(command, ItemCommand) and command.kind == DELETE:
            self._history.forget(command.item_id)
        return super().answer(command, now)

    def _commit(self, command: Command) -> list[bytes]:
        """Make a message of the sound in the buffer."""
        conversation, seconds = self._conversation, self._input.seconds
        if seconds < _MIN_COMMIT_S:
            message = (
                "Error committing input audio buffer: buffer too small."
                f" Expected at least {_MIN_COMMIT_S * 1e3:g} ms of audio,"
                f" but buffer only has {seconds * 1e3:.2f} ms of audio."
            )
            error = named_error(COMMIT_EMPTY, message)
            return [conversation.events.error(error, input_id=command.input_id)]
        item_id = conversation.events.new_id("item")
        events = conversation.commit(item_id)
        self._history.keep(item_id, (self._input.take(),))
        return events

    # --- server events ---

    def taken(self, turn: Turn, now: Moment) -> list[bytes]:
        """Open the response: clients give up if a `response.create` is not answered soon."""
        del now
        request = turn.response if isinstance(turn, ResponseTurn) else None
        self._use_formats()
        return self._conversation.begin_response(request)

    def _delta_events(self, delta: session_pb2.ChatDelta, now: Moment) -> list[bytes]:
        del now
        response = self._conversation.response
        return response.add(delta.text, self.output_sound.encode(delta.audio)) if response else []

    def done(self, done: session_pb2.Done, now: Moment) -> list[bytes]:
        """Render the end of a response."""
        del now
        self._conversation.usage.add(done.token_counts)
        if done.reason == session_pb2.FINISH_REASON_CONTEXT_FULL:
            self._history.halve()
        return self._conversation.end_response(_ENDS.get(done.reason, COMPLETED))

    def refused(self, code: ErrorCode, message: str, now: Moment) -> list[bytes]:
        """Render the end of a response that has failed. An `error` event would end some clients."""
        del now
        if code is ErrorCode.INVALID_PAYLOAD and not _ONE_MESSAGE.match(message):
            self._history.halve()  # the model has no room for all messages
        return self._conversation.end_response(
            End(Status.FAILED, error=named_error(ERRORS[code], message))
        )

    def _end_of(self, close: Close) -> End:
        """Return how a response ends with its session."""
        if code := self.refusals.get(close.reason):
            return End(Status.FAILED, error=named_error(ERRORS[code], close.text))
        return super()._end_of(close)

    def cancelled(self, cancel: CancelTurn, now: Moment) -> list[bytes]:
        """Render the end of a response that the client has cancelled."""
        del cancel, now
        return self._conversation.end_response(CLIENT_CANCELLED)
