from duplane.fabric.v1 import lease_pb2 as _lease_pb2
from duplane.fabric.v1 import registry_pb2 as _registry_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GrantEndRecord(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRANT_END_RECORD_UNSPECIFIED: _ClassVar[GrantEndRecord]
    GRANT_END_RECORD_RELEASED: _ClassVar[GrantEndRecord]
    GRANT_END_RECORD_RETURNED: _ClassVar[GrantEndRecord]
    GRANT_END_RECORD_EXPIRED: _ClassVar[GrantEndRecord]
    GRANT_END_RECORD_WORKER_GONE: _ClassVar[GrantEndRecord]
GRANT_END_RECORD_UNSPECIFIED: GrantEndRecord
GRANT_END_RECORD_RELEASED: GrantEndRecord
GRANT_END_RECORD_RETURNED: GrantEndRecord
GRANT_END_RECORD_EXPIRED: GrantEndRecord
GRANT_END_RECORD_WORKER_GONE: GrantEndRecord

class WorkerRecord(_message.Message):
    __slots__ = ("base", "epoch", "register", "is_draining", "is_drain_requested", "is_silent", "is_unreachable", "is_leaving", "is_stop_requested", "is_undrain_requested")
    BASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    IS_DRAIN_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    IS_SILENT_FIELD_NUMBER: _ClassVar[int]
    IS_UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    IS_LEAVING_FIELD_NUMBER: _ClassVar[int]
    IS_STOP_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    IS_UNDRAIN_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    base: int
    epoch: int
    register: _registry_pb2.Register
    is_draining: bool
    is_drain_requested: bool
    is_silent: bool
    is_unreachable: bool
    is_leaving: bool
    is_stop_requested: bool
    is_undrain_requested: bool
    def __init__(self, base: _Optional[int] = ..., epoch: _Optional[int] = ..., register: _Optional[_Union[_registry_pb2.Register, _Mapping]] = ..., is_draining: _Optional[bool] = ..., is_drain_requested: _Optional[bool] = ..., is_silent: _Optional[bool] = ..., is_unreachable: _Optional[bool] = ..., is_leaving: _Optional[bool] = ..., is_stop_requested: _Optional[bool] = ..., is_undrain_requested: _Optional[bool] = ...) -> None: ...

class RequestRecord(_message.Message):
    __slots__ = ("base", "order", "owner", "request", "is_granted", "holder")
    BASE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    IS_GRANTED_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    base: int
    order: int
    owner: str
    request: _lease_pb2.AcquireLeaseRequest
    is_granted: bool
    holder: bytes
    def __init__(self, base: _Optional[int] = ..., order: _Optional[int] = ..., owner: _Optional[str] = ..., request: _Optional[_Union[_lease_pb2.AcquireLeaseRequest, _Mapping]] = ..., is_granted: _Optional[bool] = ..., holder: _Optional[bytes] = ...) -> None: ...

class SlotRecord(_message.Message):
    __slots__ = ("base", "claims", "request", "is_claimed", "is_revoked", "claim_timeout_s", "end", "is_ended_by_operator")
    BASE_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    IS_CLAIMED_FIELD_NUMBER: _ClassVar[int]
    IS_REVOKED_FIELD_NUMBER: _ClassVar[int]
    CLAIM_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    IS_ENDED_BY_OPERATOR_FIELD_NUMBER: _ClassVar[int]
    base: int
    claims: _lease_pb2.LeaseClaims
    request: RequestRecord
    is_claimed: bool
    is_revoked: bool
    claim_timeout_s: float
    end: GrantEndRecord
    is_ended_by_operator: bool
    def __init__(self, base: _Optional[int] = ..., claims: _Optional[_Union[_lease_pb2.LeaseClaims, _Mapping]] = ..., request: _Optional[_Union[RequestRecord, _Mapping]] = ..., is_claimed: _Optional[bool] = ..., is_revoked: _Optional[bool] = ..., claim_timeout_s: _Optional[float] = ..., end: _Optional[_Union[GrantEndRecord, str]] = ..., is_ended_by_operator: _Optional[bool] = ...) -> None: ...

class TimeRecord(_message.Message):
    __slots__ = ("day", "held_s")
    DAY_FIELD_NUMBER: _ClassVar[int]
    HELD_S_FIELD_NUMBER: _ClassVar[int]
    day: int
    held_s: float
    def __init__(self, day: _Optional[int] = ..., held_s: _Optional[float] = ...) -> None: ...
