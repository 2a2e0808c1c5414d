import datetime

from duplane.fabric.v1 import lease_pb2 as _lease_pb2
from duplane.fabric.v1 import trace_pb2 as _trace_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ContextWindow(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTEXT_WINDOW_UNSPECIFIED: _ClassVar[ContextWindow]
    CONTEXT_WINDOW_OFF: _ClassVar[ContextWindow]
    CONTEXT_WINDOW_BASIC: _ClassVar[ContextWindow]
    CONTEXT_WINDOW_CONTEXT: _ClassVar[ContextWindow]

class DecodeMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECODE_MODE_UNSPECIFIED: _ClassVar[DecodeMode]
    DECODE_MODE_SAMPLING: _ClassVar[DecodeMode]
    DECODE_MODE_GREEDY: _ClassVar[DecodeMode]

class LeavingReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEAVING_REASON_UNSPECIFIED: _ClassVar[LeavingReason]
    LEAVING_REASON_DRAIN: _ClassVar[LeavingReason]
    LEAVING_REASON_STUCK_DEVICE: _ClassVar[LeavingReason]

class SpeechOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPEECH_OUTCOME_UNSPECIFIED: _ClassVar[SpeechOutcome]
    SPEECH_OUTCOME_SPOKEN: _ClassVar[SpeechOutcome]
    SPEECH_OUTCOME_INTERRUPTED: _ClassVar[SpeechOutcome]
    SPEECH_OUTCOME_REFUSED: _ClassVar[SpeechOutcome]

class CloseReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLOSE_REASON_UNSPECIFIED: _ClassVar[CloseReason]
    CLOSE_REASON_CLIENT: _ClassVar[CloseReason]
    CLOSE_REASON_CONTEXT_FULL: _ClassVar[CloseReason]
    CLOSE_REASON_PAUSE_TIMEOUT: _ClassVar[CloseReason]
    CLOSE_REASON_IDLE_TIMEOUT: _ClassVar[CloseReason]
    CLOSE_REASON_SHUTDOWN: _ClassVar[CloseReason]
    CLOSE_REASON_REVOKED: _ClassVar[CloseReason]
    CLOSE_REASON_ENGINE_FAILED: _ClassVar[CloseReason]
    CLOSE_REASON_OPERATOR: _ClassVar[CloseReason]

class ChatRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHAT_ROLE_UNSPECIFIED: _ClassVar[ChatRole]
    CHAT_ROLE_SYSTEM: _ClassVar[ChatRole]
    CHAT_ROLE_USER: _ClassVar[ChatRole]
    CHAT_ROLE_ASSISTANT: _ClassVar[ChatRole]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CONTEXT_FULL: _ClassVar[FinishReason]
CONTEXT_WINDOW_UNSPECIFIED: ContextWindow
CONTEXT_WINDOW_OFF: ContextWindow
CONTEXT_WINDOW_BASIC: ContextWindow
CONTEXT_WINDOW_CONTEXT: ContextWindow
DECODE_MODE_UNSPECIFIED: DecodeMode
DECODE_MODE_SAMPLING: DecodeMode
DECODE_MODE_GREEDY: DecodeMode
LEAVING_REASON_UNSPECIFIED: LeavingReason
LEAVING_REASON_DRAIN: LeavingReason
LEAVING_REASON_STUCK_DEVICE: LeavingReason
SPEECH_OUTCOME_UNSPECIFIED: SpeechOutcome
SPEECH_OUTCOME_SPOKEN: SpeechOutcome
SPEECH_OUTCOME_INTERRUPTED: SpeechOutcome
SPEECH_OUTCOME_REFUSED: SpeechOutcome
CLOSE_REASON_UNSPECIFIED: CloseReason
CLOSE_REASON_CLIENT: CloseReason
CLOSE_REASON_CONTEXT_FULL: CloseReason
CLOSE_REASON_PAUSE_TIMEOUT: CloseReason
CLOSE_REASON_IDLE_TIMEOUT: CloseReason
CLOSE_REASON_SHUTDOWN: CloseReason
CLOSE_REASON_REVOKED: CloseReason
CLOSE_REASON_ENGINE_FAILED: CloseReason
CLOSE_REASON_OPERATOR: CloseReason
CHAT_ROLE_UNSPECIFIED: ChatRole
CHAT_ROLE_SYSTEM: ChatRole
CHAT_ROLE_USER: ChatRole
CHAT_ROLE_ASSISTANT: ChatRole
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CONTEXT_FULL: FinishReason

class ConverseRequest(_message.Message):
    __slots__ = ("claim", "open", "unit", "pause", "resume", "close", "rebuild", "keep", "attach")
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    REBUILD_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    claim: Claim
    open: Open
    unit: Unit
    pause: Pause
    resume: Resume
    close: Close
    rebuild: Rebuild
    keep: Keep
    attach: Attach
    def __init__(self, claim: _Optional[_Union[Claim, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., unit: _Optional[_Union[Unit, _Mapping]] = ..., pause: _Optional[_Union[Pause, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., rebuild: _Optional[_Union[Rebuild, _Mapping]] = ..., keep: _Optional[_Union[Keep, _Mapping]] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ...) -> None: ...

class ConverseResponse(_message.Message):
    __slots__ = ("claimed", "opened", "delta", "failed", "closed", "rebuilt", "leaving", "staying", "attached", "kept")
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    REBUILT_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    STAYING_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    claimed: Claimed
    opened: Opened
    delta: Delta
    failed: Failed
    closed: Closed
    rebuilt: Rebuilt
    leaving: Leaving
    staying: Staying
    attached: Attached
    kept: Kept
    def __init__(self, claimed: _Optional[_Union[Claimed, _Mapping]] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., closed: _Optional[_Union[Closed, _Mapping]] = ..., rebuilt: _Optional[_Union[Rebuilt, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., staying: _Optional[_Union[Staying, _Mapping]] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., kept: _Optional[_Union[Kept, _Mapping]] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("lease", "trace")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    lease: _lease_pb2.Lease
    trace: _trace_pb2.TraceContext
    def __init__(self, lease: _Optional[_Union[_lease_pb2.Lease, _Mapping]] = ..., trace: _Optional[_Union[_trace_pb2.TraceContext, _Mapping]] = ...) -> None: ...

class Claimed(_message.Message):
    __slots__ = ("open_timeout",)
    OPEN_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    open_timeout: _duration_pb2.Duration
    def __init__(self, open_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("system_prompt", "llm_voice", "tts_voice", "config", "seed", "context_token_limit")
    SYSTEM_PROMPT_FIELD_NUMBER: _ClassVar[int]
    LLM_VOICE_FIELD_NUMBER: _ClassVar[int]
    TTS_VOICE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKEN_LIMIT_FIELD_NUMBER: _ClassVar[int]
    system_prompt: str
    llm_voice: bytes
    tts_voice: bytes
    config: DuplexConfig
    seed: int
    context_token_limit: int
    def __init__(self, system_prompt: _Optional[str] = ..., llm_voice: _Optional[bytes] = ..., tts_voice: _Optional[bytes] = ..., config: _Optional[_Union[DuplexConfig, _Mapping]] = ..., seed: _Optional[int] = ..., context_token_limit: _Optional[int] = ...) -> None: ...

class DuplexConfig(_message.Message):
    __slots__ = ("generate_audio", "force_listen_count", "max_new_speak_token_count", "decode_mode", "temperature", "top_k", "top_p", "text_repetition_penalty", "text_repetition_window_size", "length_penalty", "listen_prob_scale", "listen_top_k", "tts_temperature", "context_window", "basic_window_high_token_count", "basic_window_low_token_count", "context_window_unit_count", "context_window_previous_token_count")
    GENERATE_AUDIO_FIELD_NUMBER: _ClassVar[int]
    FORCE_LISTEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_SPEAK_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    DECODE_MODE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TEXT_REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    TEXT_REPETITION_WINDOW_SIZE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LISTEN_PROB_SCALE_FIELD_NUMBER: _ClassVar[int]
    LISTEN_TOP_K_FIELD_NUMBER: _ClassVar[int]
    TTS_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_WINDOW_FIELD_NUMBER: _ClassVar[int]
    BASIC_WINDOW_HIGH_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    BASIC_WINDOW_LOW_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_WINDOW_UNIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_WINDOW_PREVIOUS_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    generate_audio: bool
    force_listen_count: int
    max_new_speak_token_count: int
    decode_mode: DecodeMode
    temperature: float
    top_k: int
    top_p: float
    text_repetition_penalty: float
    text_repetition_window_size: int
    length_penalty: float
    listen_prob_scale: float
    listen_top_k: int
    tts_temperature: float
    context_window: ContextWindow
    basic_window_high_token_count: int
    basic_window_low_token_count: int
    context_window_unit_count: int
    context_window_previous_token_count: int
    def __init__(self, generate_audio: _Optional[bool] = ..., force_listen_count: _Optional[int] = ..., max_new_speak_token_count: _Optional[int] = ..., decode_mode: _Optional[_Union[DecodeMode, str]] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., text_repetition_penalty: _Optional[float] = ..., text_repetition_window_size: _Optional[int] = ..., length_penalty: _Optional[float] = ..., listen_prob_scale: _Optional[float] = ..., listen_top_k: _Optional[int] = ..., tts_temperature: _Optional[float] = ..., context_window: _Optional[_Union[ContextWindow, str]] = ..., basic_window_high_token_count: _Optional[int] = ..., basic_window_low_token_count: _Optional[int] = ..., context_window_unit_count: _Optional[int] = ..., context_window_previous_token_count: _Optional[int] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("prompt_token_count", "context_token_limit", "ignored_fields", "model_digest", "accepts_audio_exponent", "accepts_speech_requests", "accepts_keep", "accepts_row_count", "accepts_audio_int16")
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKEN_LIMIT_FIELD_NUMBER: _ClassVar[int]
    IGNORED_FIELDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_AUDIO_EXPONENT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_SPEECH_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_KEEP_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_AUDIO_INT16_FIELD_NUMBER: _ClassVar[int]
    prompt_token_count: int
    context_token_limit: int
    ignored_fields: _containers.RepeatedScalarFieldContainer[str]
    model_digest: str
    accepts_audio_exponent: bool
    accepts_speech_requests: bool
    accepts_keep: bool
    accepts_row_count: bool
    accepts_audio_int16: bool
    def __init__(self, prompt_token_count: _Optional[int] = ..., context_token_limit: _Optional[int] = ..., ignored_fields: _Optional[_Iterable[str]] = ..., model_digest: _Optional[str] = ..., accepts_audio_exponent: _Optional[bool] = ..., accepts_speech_requests: _Optional[bool] = ..., accepts_keep: _Optional[bool] = ..., accepts_row_count: _Optional[bool] = ..., accepts_audio_int16: _Optional[bool] = ...) -> None: ...

class Keep(_message.Message):
    __slots__ = ("token_sha256", "within", "hold", "granted", "edge_note", "client_sha256", "window_count")
    TOKEN_SHA256_FIELD_NUMBER: _ClassVar[int]
    WITHIN_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    EDGE_NOTE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_SHA256_FIELD_NUMBER: _ClassVar[int]
    WINDOW_COUNT_FIELD_NUMBER: _ClassVar[int]
    token_sha256: bytes
    within: _duration_pb2.Duration
    hold: _duration_pb2.Duration
    granted: _lease_pb2.Granted
    edge_note: bytes
    client_sha256: bytes
    window_count: int
    def __init__(self, token_sha256: _Optional[bytes] = ..., within: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., hold: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., granted: _Optional[_Union[_lease_pb2.Granted, _Mapping]] = ..., edge_note: _Optional[bytes] = ..., client_sha256: _Optional[bytes] = ..., window_count: _Optional[int] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("session_id", "token_secret", "after_sequence", "client_sha256")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SECRET_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_SHA256_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    token_secret: str
    after_sequence: int
    client_sha256: bytes
    def __init__(self, session_id: _Optional[str] = ..., token_secret: _Optional[str] = ..., after_sequence: _Optional[int] = ..., client_sha256: _Optional[bytes] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("open", "opened", "edge_note", "granted", "last_sequence", "received_sequence", "first_sequence", "attach_number", "is_paused", "detached_duration")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    EDGE_NOTE_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ATTACH_NUMBER_FIELD_NUMBER: _ClassVar[int]
    IS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    DETACHED_DURATION_FIELD_NUMBER: _ClassVar[int]
    open: Open
    opened: Opened
    edge_note: bytes
    granted: _lease_pb2.Granted
    last_sequence: int
    received_sequence: int
    first_sequence: int
    attach_number: int
    is_paused: bool
    detached_duration: _duration_pb2.Duration
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., edge_note: _Optional[bytes] = ..., granted: _Optional[_Union[_lease_pb2.Granted, _Mapping]] = ..., last_sequence: _Optional[int] = ..., received_sequence: _Optional[int] = ..., first_sequence: _Optional[int] = ..., attach_number: _Optional[int] = ..., is_paused: _Optional[bool] = ..., detached_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Kept(_message.Message):
    __slots__ = ("units", "is_last")
    UNITS_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    units: _containers.RepeatedCompositeFieldContainer[PastUnit]
    is_last: bool
    def __init__(self, units: _Optional[_Iterable[_Union[PastUnit, _Mapping]]] = ..., is_last: _Optional[bool] = ...) -> None: ...

class TakeOverRequest(_message.Message):
    __slots__ = ("attach", "is_done")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    IS_DONE_FIELD_NUMBER: _ClassVar[int]
    attach: Attach
    is_done: bool
    def __init__(self, attach: _Optional[_Union[Attach, _Mapping]] = ..., is_done: _Optional[bool] = ...) -> None: ...

class TakeOverResponse(_message.Message):
    __slots__ = ("attached", "delta", "kept")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    attached: Attached
    delta: Delta
    kept: Kept
    def __init__(self, attached: _Optional[_Union[Attached, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., kept: _Optional[_Union[Kept, _Mapping]] = ...) -> None: ...

class Rebuild(_message.Message):
    __slots__ = ("units", "is_last", "model_digest")
    UNITS_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    units: _containers.RepeatedCompositeFieldContainer[PastUnit]
    is_last: bool
    model_digest: str
    def __init__(self, units: _Optional[_Iterable[_Union[PastUnit, _Mapping]]] = ..., is_last: _Optional[bool] = ..., model_digest: _Optional[str] = ...) -> None: ...

class PastUnit(_message.Message):
    __slots__ = ("sequence", "audio_int16", "audio", "video_frames", "max_slice_count", "token_ids", "state_change", "context_token_count", "rebuild_state", "audio_exponent", "row_count", "had_sound", "reach")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    AUDIO_INT16_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FRAMES_FIELD_NUMBER: _ClassVar[int]
    MAX_SLICE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STATE_CHANGE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    REBUILD_STATE_FIELD_NUMBER: _ClassVar[int]
    AUDIO_EXPONENT_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    HAD_SOUND_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    audio_int16: bytes
    audio: bytes
    video_frames: _containers.RepeatedScalarFieldContainer[bytes]
    max_slice_count: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    state_change: StateChange
    context_token_count: int
    rebuild_state: bytes
    audio_exponent: int
    row_count: int
    had_sound: bool
    reach: UnitReach
    def __init__(self, sequence: _Optional[int] = ..., audio_int16: _Optional[bytes] = ..., audio: _Optional[bytes] = ..., video_frames: _Optional[_Iterable[bytes]] = ..., max_slice_count: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., state_change: _Optional[_Union[StateChange, _Mapping]] = ..., context_token_count: _Optional[int] = ..., rebuild_state: _Optional[bytes] = ..., audio_exponent: _Optional[int] = ..., row_count: _Optional[int] = ..., had_sound: _Optional[bool] = ..., reach: _Optional[_Union[UnitReach, _Mapping]] = ...) -> None: ...

class UnitReach(_message.Message):
    __slots__ = ("row_count", "context_unit_count", "sound_unit_count", "turn_unit_count")
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_UNIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    SOUND_UNIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    TURN_UNIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    row_count: int
    context_unit_count: int
    sound_unit_count: int
    turn_unit_count: int
    def __init__(self, row_count: _Optional[int] = ..., context_unit_count: _Optional[int] = ..., sound_unit_count: _Optional[int] = ..., turn_unit_count: _Optional[int] = ...) -> None: ...

class StateChange(_message.Message):
    __slots__ = ("speech_token_ids", "chosen_token_ids", "draw_count", "interrupted_turn")
    SPEECH_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAW_COUNT_FIELD_NUMBER: _ClassVar[int]
    INTERRUPTED_TURN_FIELD_NUMBER: _ClassVar[int]
    speech_token_ids: _containers.RepeatedScalarFieldContainer[int]
    chosen_token_ids: _containers.RepeatedScalarFieldContainer[int]
    draw_count: int
    interrupted_turn: bool
    def __init__(self, speech_token_ids: _Optional[_Iterable[int]] = ..., chosen_token_ids: _Optional[_Iterable[int]] = ..., draw_count: _Optional[int] = ..., interrupted_turn: _Optional[bool] = ...) -> None: ...

class Rebuilt(_message.Message):
    __slots__ = ("sequence", "context_token_count")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    context_token_count: int
    def __init__(self, sequence: _Optional[int] = ..., context_token_count: _Optional[int] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("reason", "remaining_time")
    REASON_FIELD_NUMBER: _ClassVar[int]
    REMAINING_TIME_FIELD_NUMBER: _ClassVar[int]
    reason: LeavingReason
    remaining_time: _duration_pb2.Duration
    def __init__(self, reason: _Optional[_Union[LeavingReason, str]] = ..., remaining_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Staying(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Unit(_message.Message):
    __slots__ = ("sequence", "audio", "video_frames", "force_listen", "max_slice_count", "receive_time", "trace", "forced_token_ids", "cannot_move", "speech_requests", "edge_note", "audio_int16", "audio_exponent", "edge_note_sequence")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FRAMES_FIELD_NUMBER: _ClassVar[int]
    FORCE_LISTEN_FIELD_NUMBER: _ClassVar[int]
    MAX_SLICE_COUNT_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_TIME_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    FORCED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CANNOT_MOVE_FIELD_NUMBER: _ClassVar[int]
    SPEECH_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    EDGE_NOTE_FIELD_NUMBER: _ClassVar[int]
    AUDIO_INT16_FIELD_NUMBER: _ClassVar[int]
    AUDIO_EXPONENT_FIELD_NUMBER: _ClassVar[int]
    EDGE_NOTE_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    audio: bytes
    video_frames: _containers.RepeatedScalarFieldContainer[bytes]
    force_listen: bool
    max_slice_count: int
    receive_time: _timestamp_pb2.Timestamp
    trace: _trace_pb2.TraceContext
    forced_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cannot_move: bool
    speech_requests: _containers.RepeatedCompositeFieldContainer[SpeechRequest]
    edge_note: bytes
    audio_int16: bytes
    audio_exponent: int
    edge_note_sequence: int
    def __init__(self, sequence: _Optional[int] = ..., audio: _Optional[bytes] = ..., video_frames: _Optional[_Iterable[bytes]] = ..., force_listen: _Optional[bool] = ..., max_slice_count: _Optional[int] = ..., receive_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., trace: _Optional[_Union[_trace_pb2.TraceContext, _Mapping]] = ..., forced_token_ids: _Optional[_Iterable[int]] = ..., cannot_move: _Optional[bool] = ..., speech_requests: _Optional[_Iterable[_Union[SpeechRequest, _Mapping]]] = ..., edge_note: _Optional[bytes] = ..., audio_int16: _Optional[bytes] = ..., audio_exponent: _Optional[int] = ..., edge_note_sequence: _Optional[int] = ...) -> None: ...

class SpeechRequest(_message.Message):
    __slots__ = ("number", "text")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    number: int
    text: str
    def __init__(self, number: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Pause(_message.Message):
    __slots__ = ("timeout",)
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    timeout: _duration_pb2.Duration
    def __init__(self, timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Close(_message.Message):
    __slots__ = ("reason", "keep_copy")
    REASON_FIELD_NUMBER: _ClassVar[int]
    KEEP_COPY_FIELD_NUMBER: _ClassVar[int]
    reason: str
    keep_copy: bool
    def __init__(self, reason: _Optional[str] = ..., keep_copy: _Optional[bool] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("sequence", "listen", "speech", "end_of_turn", "context_token_count", "dropped_unit_count", "token_counts", "stage_times", "token_ids", "trace", "state_change", "rebuild_state", "interrupted_turn", "listen_probability", "speech_request", "speech_results", "reach")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LISTEN_FIELD_NUMBER: _ClassVar[int]
    SPEECH_FIELD_NUMBER: _ClassVar[int]
    END_OF_TURN_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_UNIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    STAGE_TIMES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    STATE_CHANGE_FIELD_NUMBER: _ClassVar[int]
    REBUILD_STATE_FIELD_NUMBER: _ClassVar[int]
    INTERRUPTED_TURN_FIELD_NUMBER: _ClassVar[int]
    LISTEN_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    SPEECH_REQUEST_FIELD_NUMBER: _ClassVar[int]
    SPEECH_RESULTS_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    listen: Listen
    speech: Speech
    end_of_turn: bool
    context_token_count: int
    dropped_unit_count: int
    token_counts: TokenCounts
    stage_times: StageTimes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    trace: _trace_pb2.TraceContext
    state_change: StateChange
    rebuild_state: bytes
    interrupted_turn: bool
    listen_probability: float
    speech_request: int
    speech_results: _containers.RepeatedCompositeFieldContainer[SpeechResult]
    reach: UnitReach
    def __init__(self, sequence: _Optional[int] = ..., listen: _Optional[_Union[Listen, _Mapping]] = ..., speech: _Optional[_Union[Speech, _Mapping]] = ..., end_of_turn: _Optional[bool] = ..., context_token_count: _Optional[int] = ..., dropped_unit_count: _Optional[int] = ..., token_counts: _Optional[_Union[TokenCounts, _Mapping]] = ..., stage_times: _Optional[_Union[StageTimes, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., trace: _Optional[_Union[_trace_pb2.TraceContext, _Mapping]] = ..., state_change: _Optional[_Union[StateChange, _Mapping]] = ..., rebuild_state: _Optional[bytes] = ..., interrupted_turn: _Optional[bool] = ..., listen_probability: _Optional[float] = ..., speech_request: _Optional[int] = ..., speech_results: _Optional[_Iterable[_Union[SpeechResult, _Mapping]]] = ..., reach: _Optional[_Union[UnitReach, _Mapping]] = ...) -> None: ...

class SpeechResult(_message.Message):
    __slots__ = ("number", "outcome", "reason", "message", "field")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    number: int
    outcome: SpeechOutcome
    reason: str
    message: str
    field: str
    def __init__(self, number: _Optional[int] = ..., outcome: _Optional[_Union[SpeechOutcome, str]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ...) -> None: ...

class Listen(_message.Message):
    __slots__ = ("is_forced",)
    IS_FORCED_FIELD_NUMBER: _ClassVar[int]
    is_forced: bool
    def __init__(self, is_forced: _Optional[bool] = ...) -> None: ...

class Speech(_message.Message):
    __slots__ = ("text", "audio", "sample_count")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    text: str
    audio: bytes
    sample_count: int
    def __init__(self, text: _Optional[str] = ..., audio: _Optional[bytes] = ..., sample_count: _Optional[int] = ...) -> None: ...

class TokenCounts(_message.Message):
    __slots__ = ("input_audio_token_count", "input_video_token_count", "input_text_token_count", "output_text_token_count", "output_audio_token_count")
    INPUT_AUDIO_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    INPUT_VIDEO_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    INPUT_TEXT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TEXT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_AUDIO_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    input_audio_token_count: int
    input_video_token_count: int
    input_text_token_count: int
    output_text_token_count: int
    output_audio_token_count: int
    def __init__(self, input_audio_token_count: _Optional[int] = ..., input_video_token_count: _Optional[int] = ..., input_text_token_count: _Optional[int] = ..., output_text_token_count: _Optional[int] = ..., output_audio_token_count: _Optional[int] = ...) -> None: ...

class StageTimes(_message.Message):
    __slots__ = ("inbox", "audio", "vision", "prefill", "decode", "talker", "vocoder", "settle", "total", "device", "prepare", "condition")
    INBOX_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    VISION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TALKER_FIELD_NUMBER: _ClassVar[int]
    VOCODER_FIELD_NUMBER: _ClassVar[int]
    SETTLE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    inbox: _duration_pb2.Duration
    audio: _duration_pb2.Duration
    vision: _duration_pb2.Duration
    prefill: _duration_pb2.Duration
    decode: _duration_pb2.Duration
    talker: _duration_pb2.Duration
    vocoder: _duration_pb2.Duration
    settle: _duration_pb2.Duration
    total: _duration_pb2.Duration
    device: _duration_pb2.Duration
    prepare: _duration_pb2.Duration
    condition: _duration_pb2.Duration
    def __init__(self, inbox: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., audio: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., vision: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prefill: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decode: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., talker: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., vocoder: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., settle: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., total: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., device: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prepare: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., condition: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("sequence", "reason", "message", "field", "speech_results")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    SPEECH_RESULTS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    reason: str
    message: str
    field: str
    speech_results: _containers.RepeatedCompositeFieldContainer[SpeechResult]
    def __init__(self, sequence: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., speech_results: _Optional[_Iterable[_Union[SpeechResult, _Mapping]]] = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ("reason", "message", "token_counts", "unit_count", "dropped_unit_count")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    UNIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_UNIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    reason: CloseReason
    message: str
    token_counts: TokenCounts
    unit_count: int
    dropped_unit_count: int
    def __init__(self, reason: _Optional[_Union[CloseReason, str]] = ..., message: _Optional[str] = ..., token_counts: _Optional[_Union[TokenCounts, _Mapping]] = ..., unit_count: _Optional[int] = ..., dropped_unit_count: _Optional[int] = ...) -> None: ...

class ChatRequest(_message.Message):
    __slots__ = ("lease", "messages", "config", "seed", "trace")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    lease: _lease_pb2.Lease
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    config: ChatConfig
    seed: int
    trace: _trace_pb2.TraceContext
    def __init__(self, lease: _Optional[_Union[_lease_pb2.Lease, _Mapping]] = ..., messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., config: _Optional[_Union[ChatConfig, _Mapping]] = ..., seed: _Optional[int] = ..., trace: _Optional[_Union[_trace_pb2.TraceContext, _Mapping]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "parts")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    role: ChatRole
    parts: _containers.RepeatedCompositeFieldContainer[ChatPart]
    def __init__(self, role: _Optional[_Union[ChatRole, str]] = ..., parts: _Optional[_Iterable[_Union[ChatPart, _Mapping]]] = ...) -> None: ...

class ChatPart(_message.Message):
    __slots__ = ("text", "image", "audio", "video", "video_stack_frame_count")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FIELD_NUMBER: _ClassVar[int]
    VIDEO_STACK_FRAME_COUNT_FIELD_NUMBER: _ClassVar[int]
    text: str
    image: bytes
    audio: bytes
    video: bytes
    video_stack_frame_count: int
    def __init__(self, text: _Optional[str] = ..., image: _Optional[bytes] = ..., audio: _Optional[bytes] = ..., video: _Optional[bytes] = ..., video_stack_frame_count: _Optional[int] = ...) -> None: ...

class ChatConfig(_message.Message):
    __slots__ = ("max_new_token_count", "temperature", "top_k", "top_p", "length_penalty", "repetition_penalty", "decode_mode", "is_thinking", "generate_audio", "tts_voice", "max_slice_count", "is_omni", "use_tts_template", "use_image_id")
    MAX_NEW_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    DECODE_MODE_FIELD_NUMBER: _ClassVar[int]
    IS_THINKING_FIELD_NUMBER: _ClassVar[int]
    GENERATE_AUDIO_FIELD_NUMBER: _ClassVar[int]
    TTS_VOICE_FIELD_NUMBER: _ClassVar[int]
    MAX_SLICE_COUNT_FIELD_NUMBER: _ClassVar[int]
    IS_OMNI_FIELD_NUMBER: _ClassVar[int]
    USE_TTS_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    USE_IMAGE_ID_FIELD_NUMBER: _ClassVar[int]
    max_new_token_count: int
    temperature: float
    top_k: int
    top_p: float
    length_penalty: float
    repetition_penalty: float
    decode_mode: DecodeMode
    is_thinking: bool
    generate_audio: bool
    tts_voice: bytes
    max_slice_count: int
    is_omni: bool
    use_tts_template: bool
    use_image_id: bool
    def __init__(self, max_new_token_count: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., length_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., decode_mode: _Optional[_Union[DecodeMode, str]] = ..., is_thinking: _Optional[bool] = ..., generate_audio: _Optional[bool] = ..., tts_voice: _Optional[bytes] = ..., max_slice_count: _Optional[int] = ..., is_omni: _Optional[bool] = ..., use_tts_template: _Optional[bool] = ..., use_image_id: _Optional[bool] = ...) -> None: ...

class ChatResponse(_message.Message):
    __slots__ = ("prefilled", "delta", "done")
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    prefilled: Prefilled
    delta: ChatDelta
    done: Done
    def __init__(self, prefilled: _Optional[_Union[Prefilled, _Mapping]] = ..., delta: _Optional[_Union[ChatDelta, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("prompt_token_count", "ignored_fields")
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    IGNORED_FIELDS_FIELD_NUMBER: _ClassVar[int]
    prompt_token_count: int
    ignored_fields: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, prompt_token_count: _Optional[int] = ..., ignored_fields: _Optional[_Iterable[str]] = ...) -> None: ...

class ChatDelta(_message.Message):
    __slots__ = ("sequence", "text", "audio", "token_ids", "stage_times", "context_token_count")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STAGE_TIMES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    text: str
    audio: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    stage_times: StageTimes
    context_token_count: int
    def __init__(self, sequence: _Optional[int] = ..., text: _Optional[str] = ..., audio: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., stage_times: _Optional[_Union[StageTimes, _Mapping]] = ..., context_token_count: _Optional[int] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("reason", "token_counts")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    token_counts: TokenCounts
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., token_counts: _Optional[_Union[TokenCounts, _Mapping]] = ...) -> None: ...
