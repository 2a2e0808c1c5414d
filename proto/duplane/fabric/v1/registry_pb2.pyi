import datetime

from duplane.fabric.v1 import lease_pb2 as _lease_pb2
from duplane.fabric.v1 import model_pb2 as _model_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SlotState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SLOT_STATE_UNSPECIFIED: _ClassVar[SlotState]
    SLOT_STATE_FREE: _ClassVar[SlotState]
    SLOT_STATE_OCCUPIED: _ClassVar[SlotState]
    SLOT_STATE_CLEANING: _ClassVar[SlotState]
    SLOT_STATE_BROKEN: _ClassVar[SlotState]
SLOT_STATE_UNSPECIFIED: SlotState
SLOT_STATE_FREE: SlotState
SLOT_STATE_OCCUPIED: SlotState
SLOT_STATE_CLEANING: SlotState
SLOT_STATE_BROKEN: SlotState

class AttachRequest(_message.Message):
    __slots__ = ("register", "report")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    register: Register
    report: Report
    def __init__(self, register: _Optional[_Union[Register, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("registered", "drain", "revoke", "progress", "undrain")
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    UNDRAIN_FIELD_NUMBER: _ClassVar[int]
    registered: Registered
    drain: Drain
    revoke: Revoke
    progress: Progress
    undrain: Undrain
    def __init__(self, registered: _Optional[_Union[Registered, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., revoke: _Optional[_Union[Revoke, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., undrain: _Optional[_Union[Undrain, _Mapping]] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address", "pool", "device", "model", "kinds", "slots", "is_draining", "labels", "stream_number", "release", "features")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    STREAM_NUMBER_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    address: str
    pool: str
    device: Device
    model: _model_pb2.Model
    kinds: _containers.RepeatedScalarFieldContainer[_lease_pb2.SessionKind]
    slots: _containers.RepeatedCompositeFieldContainer[SlotReport]
    is_draining: bool
    labels: _containers.ScalarMap[str, str]
    stream_number: int
    release: str
    features: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., pool: _Optional[str] = ..., device: _Optional[_Union[Device, _Mapping]] = ..., model: _Optional[_Union[_model_pb2.Model, _Mapping]] = ..., kinds: _Optional[_Iterable[_Union[_lease_pb2.SessionKind, str]]] = ..., slots: _Optional[_Iterable[_Union[SlotReport, _Mapping]]] = ..., is_draining: _Optional[bool] = ..., labels: _Optional[_Mapping[str, str]] = ..., stream_number: _Optional[int] = ..., release: _Optional[str] = ..., features: _Optional[_Iterable[str]] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("name", "description", "memory_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    memory_bytes: int
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class SlotReport(_message.Message):
    __slots__ = ("slot", "state", "fencing_number", "lease_id", "session_id", "kind", "is_paused", "cannot_move", "holder", "is_withheld", "tenant_id")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FENCING_NUMBER_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    IS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    CANNOT_MOVE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    IS_WITHHELD_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    slot: int
    state: SlotState
    fencing_number: int
    lease_id: str
    session_id: str
    kind: _lease_pb2.SessionKind
    is_paused: bool
    cannot_move: bool
    holder: bytes
    is_withheld: bool
    tenant_id: str
    def __init__(self, slot: _Optional[int] = ..., state: _Optional[_Union[SlotState, str]] = ..., fencing_number: _Optional[int] = ..., lease_id: _Optional[str] = ..., session_id: _Optional[str] = ..., kind: _Optional[_Union[_lease_pb2.SessionKind, str]] = ..., is_paused: _Optional[bool] = ..., cannot_move: _Optional[bool] = ..., holder: _Optional[bytes] = ..., is_withheld: _Optional[bool] = ..., tenant_id: _Optional[str] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("slots", "is_draining", "memory_used_bytes", "unit_count", "unit_time", "is_leaving")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNIT_TIME_FIELD_NUMBER: _ClassVar[int]
    IS_LEAVING_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedCompositeFieldContainer[SlotReport]
    is_draining: bool
    memory_used_bytes: int
    unit_count: int
    unit_time: _duration_pb2.Duration
    is_leaving: bool
    def __init__(self, slots: _Optional[_Iterable[_Union[SlotReport, _Mapping]]] = ..., is_draining: _Optional[bool] = ..., memory_used_bytes: _Optional[int] = ..., unit_count: _Optional[int] = ..., unit_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., is_leaving: _Optional[bool] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("worker_epoch", "verification_keys", "report_interval")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_KEYS_FIELD_NUMBER: _ClassVar[int]
    REPORT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    verification_keys: _containers.RepeatedCompositeFieldContainer[VerificationKey]
    report_interval: _duration_pb2.Duration
    def __init__(self, worker_epoch: _Optional[int] = ..., verification_keys: _Optional[_Iterable[_Union[VerificationKey, _Mapping]]] = ..., report_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class VerificationKey(_message.Message):
    __slots__ = ("key_id", "public_key")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    public_key: bytes
    def __init__(self, key_id: _Optional[str] = ..., public_key: _Optional[bytes] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("fencing_number",)
    FENCING_NUMBER_FIELD_NUMBER: _ClassVar[int]
    fencing_number: int
    def __init__(self, fencing_number: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("is_stop",)
    IS_STOP_FIELD_NUMBER: _ClassVar[int]
    is_stop: bool
    def __init__(self, is_stop: _Optional[bool] = ...) -> None: ...

class Undrain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Revoke(_message.Message):
    __slots__ = ("slot", "fencing_number", "lease_id", "is_end")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    FENCING_NUMBER_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    IS_END_FIELD_NUMBER: _ClassVar[int]
    slot: int
    fencing_number: int
    lease_id: str
    is_end: bool
    def __init__(self, slot: _Optional[int] = ..., fencing_number: _Optional[int] = ..., lease_id: _Optional[str] = ..., is_end: _Optional[bool] = ...) -> None: ...
