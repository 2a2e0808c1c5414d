import datetime

from duplane.fabric.v1 import lease_pb2 as _lease_pb2
from duplane.fabric.v1 import registry_pb2 as _registry_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerStatus(_message.Message):
    __slots__ = ("worker", "worker_epoch", "is_draining", "report", "attached_duration", "report_age", "is_silent", "is_unreachable", "lost_duration", "lost_reason")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_DURATION_FIELD_NUMBER: _ClassVar[int]
    REPORT_AGE_FIELD_NUMBER: _ClassVar[int]
    IS_SILENT_FIELD_NUMBER: _ClassVar[int]
    IS_UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    LOST_DURATION_FIELD_NUMBER: _ClassVar[int]
    LOST_REASON_FIELD_NUMBER: _ClassVar[int]
    worker: _registry_pb2.Register
    worker_epoch: int
    is_draining: bool
    report: _registry_pb2.Report
    attached_duration: _duration_pb2.Duration
    report_age: _duration_pb2.Duration
    is_silent: bool
    is_unreachable: bool
    lost_duration: _duration_pb2.Duration
    lost_reason: str
    def __init__(self, worker: _Optional[_Union[_registry_pb2.Register, _Mapping]] = ..., worker_epoch: _Optional[int] = ..., is_draining: _Optional[bool] = ..., report: _Optional[_Union[_registry_pb2.Report, _Mapping]] = ..., attached_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., report_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., is_silent: _Optional[bool] = ..., is_unreachable: _Optional[bool] = ..., lost_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., lost_reason: _Optional[str] = ...) -> None: ...

class LeaseStatus(_message.Message):
    __slots__ = ("claims", "is_claimed", "held_duration", "estimated_remaining", "worker_address")
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    IS_CLAIMED_FIELD_NUMBER: _ClassVar[int]
    HELD_DURATION_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_REMAINING_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    claims: _lease_pb2.LeaseClaims
    is_claimed: bool
    held_duration: _duration_pb2.Duration
    estimated_remaining: _duration_pb2.Duration
    worker_address: str
    def __init__(self, claims: _Optional[_Union[_lease_pb2.LeaseClaims, _Mapping]] = ..., is_claimed: _Optional[bool] = ..., held_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., estimated_remaining: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., worker_address: _Optional[str] = ...) -> None: ...

class TicketStatus(_message.Message):
    __slots__ = ("ticket_id", "kind", "pool", "session_id", "position", "estimated_wait", "waited_duration", "needs", "tenant_id")
    class NeedsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_WAIT_FIELD_NUMBER: _ClassVar[int]
    WAITED_DURATION_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    kind: _lease_pb2.SessionKind
    pool: str
    session_id: str
    position: int
    estimated_wait: _duration_pb2.Duration
    waited_duration: _duration_pb2.Duration
    needs: _containers.ScalarMap[str, str]
    tenant_id: str
    def __init__(self, ticket_id: _Optional[str] = ..., kind: _Optional[_Union[_lease_pb2.SessionKind, str]] = ..., pool: _Optional[str] = ..., session_id: _Optional[str] = ..., position: _Optional[int] = ..., estimated_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., waited_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., needs: _Optional[_Mapping[str, str]] = ..., tenant_id: _Optional[str] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers", "next_page_token", "store_refusal")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STORE_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    next_page_token: str
    store_refusal: str
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., store_refusal: _Optional[str] = ...) -> None: ...

class ListLeasesRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "session_id")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    session_id: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class ListLeasesResponse(_message.Message):
    __slots__ = ("leases", "next_page_token")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseStatus]
    next_page_token: str
    def __init__(self, leases: _Optional[_Iterable[_Union[LeaseStatus, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListTicketsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListTicketsResponse(_message.Message):
    __slots__ = ("tickets", "ticket_limit", "next_page_token")
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    TICKET_LIMIT_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tickets: _containers.RepeatedCompositeFieldContainer[TicketStatus]
    ticket_limit: int
    next_page_token: str
    def __init__(self, tickets: _Optional[_Iterable[_Union[TicketStatus, _Mapping]]] = ..., ticket_limit: _Optional[int] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("snapshot", "worker", "removed_worker_id", "lease", "removed_lease_id", "ticket", "removed_ticket_id")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    REMOVED_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REMOVED_LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    REMOVED_TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    snapshot: Snapshot
    worker: WorkerStatus
    removed_worker_id: str
    lease: LeaseStatus
    removed_lease_id: str
    ticket: TicketStatus
    removed_ticket_id: str
    def __init__(self, snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., worker: _Optional[_Union[WorkerStatus, _Mapping]] = ..., removed_worker_id: _Optional[str] = ..., lease: _Optional[_Union[LeaseStatus, _Mapping]] = ..., removed_lease_id: _Optional[str] = ..., ticket: _Optional[_Union[TicketStatus, _Mapping]] = ..., removed_ticket_id: _Optional[str] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("workers", "leases", "tickets", "ticket_limit", "has_more", "store_refusal")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    TICKET_LIMIT_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    STORE_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseStatus]
    tickets: _containers.RepeatedCompositeFieldContainer[TicketStatus]
    ticket_limit: int
    has_more: bool
    store_refusal: str
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., leases: _Optional[_Iterable[_Union[LeaseStatus, _Mapping]]] = ..., tickets: _Optional[_Iterable[_Union[TicketStatus, _Mapping]]] = ..., ticket_limit: _Optional[int] = ..., has_more: _Optional[bool] = ..., store_refusal: _Optional[str] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "is_stop")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    IS_STOP_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    is_stop: bool
    def __init__(self, worker_id: _Optional[str] = ..., is_stop: _Optional[bool] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class UndrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CancelTicketRequest(_message.Message):
    __slots__ = ("ticket_id",)
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    def __init__(self, ticket_id: _Optional[str] = ...) -> None: ...

class CancelTicketResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndSessionRequest(_message.Message):
    __slots__ = ("session_id", "lease_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    lease_id: str
    def __init__(self, session_id: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class EndSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HoldEstimate(_message.Message):
    __slots__ = ("kind", "base_duration", "mean_duration", "sample_count")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    MEAN_DURATION_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    kind: _lease_pb2.SessionKind
    base_duration: _duration_pb2.Duration
    mean_duration: _duration_pb2.Duration
    sample_count: int
    def __init__(self, kind: _Optional[_Union[_lease_pb2.SessionKind, str]] = ..., base_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., mean_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., sample_count: _Optional[int] = ...) -> None: ...

class Estimates(_message.Message):
    __slots__ = ("holds", "smoothing", "needed_sample_count")
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    SMOOTHING_FIELD_NUMBER: _ClassVar[int]
    NEEDED_SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    holds: _containers.RepeatedCompositeFieldContainer[HoldEstimate]
    smoothing: float
    needed_sample_count: int
    def __init__(self, holds: _Optional[_Iterable[_Union[HoldEstimate, _Mapping]]] = ..., smoothing: _Optional[float] = ..., needed_sample_count: _Optional[int] = ...) -> None: ...

class GetEstimatesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetEstimatesResponse(_message.Message):
    __slots__ = ("estimates",)
    ESTIMATES_FIELD_NUMBER: _ClassVar[int]
    estimates: Estimates
    def __init__(self, estimates: _Optional[_Union[Estimates, _Mapping]] = ...) -> None: ...

class BaseHold(_message.Message):
    __slots__ = ("kind", "base_duration")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    kind: _lease_pb2.SessionKind
    base_duration: _duration_pb2.Duration
    def __init__(self, kind: _Optional[_Union[_lease_pb2.SessionKind, str]] = ..., base_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class UpdateEstimatesRequest(_message.Message):
    __slots__ = ("bases", "smoothing")
    BASES_FIELD_NUMBER: _ClassVar[int]
    SMOOTHING_FIELD_NUMBER: _ClassVar[int]
    bases: _containers.RepeatedCompositeFieldContainer[BaseHold]
    smoothing: float
    def __init__(self, bases: _Optional[_Iterable[_Union[BaseHold, _Mapping]]] = ..., smoothing: _Optional[float] = ...) -> None: ...

class UpdateEstimatesResponse(_message.Message):
    __slots__ = ("estimates",)
    ESTIMATES_FIELD_NUMBER: _ClassVar[int]
    estimates: Estimates
    def __init__(self, estimates: _Optional[_Union[Estimates, _Mapping]] = ...) -> None: ...
