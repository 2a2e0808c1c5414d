import datetime

from duplane.fabric.v1 import model_pb2 as _model_pb2
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

class SessionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_KIND_UNSPECIFIED: _ClassVar[SessionKind]
    SESSION_KIND_AUDIO_DUPLEX: _ClassVar[SessionKind]
    SESSION_KIND_OMNI_DUPLEX: _ClassVar[SessionKind]
    SESSION_KIND_CHAT: _ClassVar[SessionKind]
SESSION_KIND_UNSPECIFIED: SessionKind
SESSION_KIND_AUDIO_DUPLEX: SessionKind
SESSION_KIND_OMNI_DUPLEX: SessionKind
SESSION_KIND_CHAT: SessionKind

class AcquireLeaseRequest(_message.Message):
    __slots__ = ("request_id", "ticket_id", "kind", "pool", "session_id", "client_id", "trace", "avoided_worker_ids", "needs", "avoided_duration", "avoided_worker_incarnations", "model", "caller_key", "ticket_proof", "tenant_id", "tenant_limits", "was_granted", "queue_token", "wants_queue_token")
    class NeedsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    AVOIDED_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    AVOIDED_DURATION_FIELD_NUMBER: _ClassVar[int]
    AVOIDED_WORKER_INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CALLER_KEY_FIELD_NUMBER: _ClassVar[int]
    TICKET_PROOF_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_LIMITS_FIELD_NUMBER: _ClassVar[int]
    WAS_GRANTED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    WANTS_QUEUE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    ticket_id: str
    kind: SessionKind
    pool: str
    session_id: str
    client_id: str
    trace: _trace_pb2.TraceContext
    avoided_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    needs: _containers.ScalarMap[str, str]
    avoided_duration: _duration_pb2.Duration
    avoided_worker_incarnations: _containers.RepeatedScalarFieldContainer[str]
    model: str
    caller_key: bytes
    ticket_proof: bytes
    tenant_id: str
    tenant_limits: TenantLimits
    was_granted: bool
    queue_token: str
    wants_queue_token: bool
    def __init__(self, request_id: _Optional[str] = ..., ticket_id: _Optional[str] = ..., kind: _Optional[_Union[SessionKind, str]] = ..., pool: _Optional[str] = ..., session_id: _Optional[str] = ..., client_id: _Optional[str] = ..., trace: _Optional[_Union[_trace_pb2.TraceContext, _Mapping]] = ..., avoided_worker_ids: _Optional[_Iterable[str]] = ..., needs: _Optional[_Mapping[str, str]] = ..., avoided_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., avoided_worker_incarnations: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ..., caller_key: _Optional[bytes] = ..., ticket_proof: _Optional[bytes] = ..., tenant_id: _Optional[str] = ..., tenant_limits: _Optional[_Union[TenantLimits, _Mapping]] = ..., was_granted: _Optional[bool] = ..., queue_token: _Optional[str] = ..., wants_queue_token: _Optional[bool] = ...) -> None: ...

class TenantLimits(_message.Message):
    __slots__ = ("session_count", "waiting_count", "daily_minutes")
    SESSION_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    DAILY_MINUTES_FIELD_NUMBER: _ClassVar[int]
    session_count: int
    waiting_count: int
    daily_minutes: int
    def __init__(self, session_count: _Optional[int] = ..., waiting_count: _Optional[int] = ..., daily_minutes: _Optional[int] = ...) -> None: ...

class AcquireLeaseResponse(_message.Message):
    __slots__ = ("queued", "granted")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    queued: Queued
    granted: Granted
    def __init__(self, queued: _Optional[_Union[Queued, _Mapping]] = ..., granted: _Optional[_Union[Granted, _Mapping]] = ...) -> None: ...

class Queued(_message.Message):
    __slots__ = ("ticket_id", "position", "queue_length", "estimated_wait", "ticket_proof", "queue_token")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_WAIT_FIELD_NUMBER: _ClassVar[int]
    TICKET_PROOF_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    position: int
    queue_length: int
    estimated_wait: _duration_pb2.Duration
    ticket_proof: bytes
    queue_token: str
    def __init__(self, ticket_id: _Optional[str] = ..., position: _Optional[int] = ..., queue_length: _Optional[int] = ..., estimated_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., ticket_proof: _Optional[bytes] = ..., queue_token: _Optional[str] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("lease", "lease_id", "worker_address", "claim_timeout", "ticket_id", "worker_id", "model", "worker_incarnation", "model_label", "ticket_proof", "release", "features", "session_proof")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CLAIM_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WORKER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_LABEL_FIELD_NUMBER: _ClassVar[int]
    TICKET_PROOF_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    SESSION_PROOF_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    lease_id: str
    worker_address: str
    claim_timeout: _duration_pb2.Duration
    ticket_id: str
    worker_id: str
    model: _model_pb2.Model
    worker_incarnation: str
    model_label: str
    ticket_proof: bytes
    release: str
    features: _containers.RepeatedScalarFieldContainer[str]
    session_proof: bytes
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ..., lease_id: _Optional[str] = ..., worker_address: _Optional[str] = ..., claim_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., ticket_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., model: _Optional[_Union[_model_pb2.Model, _Mapping]] = ..., worker_incarnation: _Optional[str] = ..., model_label: _Optional[str] = ..., ticket_proof: _Optional[bytes] = ..., release: _Optional[str] = ..., features: _Optional[_Iterable[str]] = ..., session_proof: _Optional[bytes] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("claims", "signature", "key_id")
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    claims: bytes
    signature: bytes
    key_id: str
    def __init__(self, claims: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., key_id: _Optional[str] = ...) -> None: ...

class LeaseClaims(_message.Message):
    __slots__ = ("lease_id", "worker_id", "worker_epoch", "slot", "fencing_number", "kind", "session_id", "expire_time", "claim_timeout", "holder", "tenant_id")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    FENCING_NUMBER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    CLAIM_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    worker_id: str
    worker_epoch: int
    slot: int
    fencing_number: int
    kind: SessionKind
    session_id: str
    expire_time: _timestamp_pb2.Timestamp
    claim_timeout: _duration_pb2.Duration
    holder: bytes
    tenant_id: str
    def __init__(self, lease_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., worker_epoch: _Optional[int] = ..., slot: _Optional[int] = ..., fencing_number: _Optional[int] = ..., kind: _Optional[_Union[SessionKind, str]] = ..., session_id: _Optional[str] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., claim_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., holder: _Optional[bytes] = ..., tenant_id: _Optional[str] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("lease_id", "request_id", "unreachable_worker_id", "caller_key")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CALLER_KEY_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    request_id: str
    unreachable_worker_id: str
    caller_key: bytes
    def __init__(self, lease_id: _Optional[str] = ..., request_id: _Optional[str] = ..., unreachable_worker_id: _Optional[str] = ..., caller_key: _Optional[bytes] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
