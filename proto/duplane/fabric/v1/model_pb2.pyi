import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Model(_message.Message):
    __slots__ = ("name", "parameter_count", "context_token_limit", "digest", "unit_duration", "input_rate_hertz", "output_rate_hertz", "accepts_pictures", "accepts_speech_requests")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_COUNT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKEN_LIMIT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    UNIT_DURATION_FIELD_NUMBER: _ClassVar[int]
    INPUT_RATE_HERTZ_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_RATE_HERTZ_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_PICTURES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_SPEECH_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    parameter_count: int
    context_token_limit: int
    digest: str
    unit_duration: _duration_pb2.Duration
    input_rate_hertz: int
    output_rate_hertz: int
    accepts_pictures: bool
    accepts_speech_requests: bool
    def __init__(self, name: _Optional[str] = ..., parameter_count: _Optional[int] = ..., context_token_limit: _Optional[int] = ..., digest: _Optional[str] = ..., unit_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., input_rate_hertz: _Optional[int] = ..., output_rate_hertz: _Optional[int] = ..., accepts_pictures: _Optional[bool] = ..., accepts_speech_requests: _Optional[bool] = ...) -> None: ...
