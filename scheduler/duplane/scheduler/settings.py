"""Settings of one scheduler process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt, Le
from cyclopts import Parameter
from cyclopts.types import ExistingFile

from duplane.fabric.addresses import parse_address
from duplane.fabric.bounds import MAX_CLAIM_TIMEOUT_S
from duplane.fabric.settings import (
    LogFormat,
    LogLevel,
    Names,
    PositiveFloat,
    PositiveInt,
    check_bounds,
)
from duplane.fabric.tls.settings import FabricTlsSettings
from duplane.scheduler.store.url import check_url


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """Settings of one scheduler process. Raises ValueError that names an unusable setting."""

    listen: str = "127.0.0.1:8010"
    """Address to serve at, as HOST:PORT; port 0 picks a free one."""
    store: str = "memory:"
    """Where leases are kept: `memory:` for one scheduler, or `etcd://HOST:PORT[,HOST:PORT]` for any
    number of schedulers. `?prefix=/duplane/` after the addresses sets the prefix of all keys."""
    store_ca: ExistingFile | None = None
    """Certificates to verify etcd with (PEM). Without this file, connections are not encrypted. All
    files for etcd are read again when they change and on SIGHUP."""
    store_cert: ExistingFile | None = None
    """Certificate that this scheduler shows to etcd (PEM); needs --store-key and --store-ca."""
    store_key: ExistingFile | None = None
    """Private key of --store-cert (PEM, no password)."""
    store_user: str = ""
    """User in etcd; needs --store-password."""
    store_password: ExistingFile | None = None
    """File with the password of --store-user."""
    signing_key: ExistingFile | None = None
    """Key that signs leases (Ed25519, PEM, no password). Default: a new key for each process."""
    signing_key_age_s: Annotated[float, Ge(60)] = 86_400.0
    """Seconds after which a scheduler replaces the key that it signs leases with, at least 60. The
    key of --signing-key is never replaced."""
    pools: Names = ()
    """Names of pools, separated by commas, whose workers are started when sessions wait. While such
    a pool has no worker, its sessions wait, and the metrics count them under its name. Default:
    sessions of a pool without workers are refused if another pool has workers."""
    ticket_limit: PositiveInt = 1000
    """Maximum number of sessions that wait in the fabric; more are refused with QUEUE_FULL."""
    tenant_ticket_share: Annotated[float, Gt(0), Le(1)] = 0.1
    """Share of --ticket-limit that the sessions of one tenant may use, above 0 and at most 1; more
    are refused with TENANT_QUOTA. Sessions without a tenant may use the whole queue."""
    claim_timeout_s: Annotated[float, Gt(0), Le(MAX_CLAIM_TIMEOUT_S)] = 5.0
    """Seconds within which a granted slot must be claimed, at most 60; otherwise the next session
    in the queue gets the slot."""
    report_interval_s: PositiveFloat = 2.0
    """Seconds between two reports of a worker. A worker that misses three reports gets no new
    sessions."""
    queued_interval_s: PositiveFloat = 3.0
    """Seconds between two updates to a waiting caller whose position does not change."""
    resume_grace_s: PositiveFloat = 1.5
    """If a restart has lost the queue, nothing is granted for up to this many seconds, so that
    waiting sessions can return to their places. Grants begin earlier if no more sessions return."""
    register_timeout_s: PositiveFloat = 10.0
    """Seconds within which a connected worker must register; otherwise its stream ends."""
    stop_timeout_s: PositiveFloat = 2.0
    """Seconds within which calls must end at shutdown; otherwise they are cancelled."""
    metrics_listen: str = ""
    """Address at which Prometheus reads the metrics of this process, at /metrics, as HOST:PORT;
    port 0 picks a free one. It has no TLS and no authentication, so an address that other machines
    can reach needs --metrics-public. Default: nowhere."""
    metrics_public: bool = False
    """Allow that other machines read the metrics."""
    health_listen: str = ""
    """Address at which probes ask for the health of this process, as HOST:PORT; port 0 picks a free
    one. /livez, /readyz and /startupz answer 200 or 503, /status answers with a JSON object. There
    is no TLS and no authentication, also beyond this machine, and the answers have no details.
    Default: nowhere."""
    log_level: LogLevel = "INFO"
    """Least severe level to log. SIGUSR1 changes it to DEBUG while the process runs, SIGUSR2
    changes it back."""
    log_format: LogFormat = "text"
    """Format of log lines: text, or JSON with one object per line."""
    fabric: FabricTlsSettings = field(default_factory=FabricTlsSettings)

    def __post_init__(self) -> None:
        check_bounds(self)
        parse_address(self.listen, "listen", min_port=0)
        if self.metrics_listen:
            parse_address(self.metrics_listen, "metrics_listen", min_port=0)
        if self.health_listen:
            parse_address(self.health_listen, "health_listen", min_port=0)
        check_url(self.store)
        if (self.store_cert is None) != (self.store_key is None):
            raise ValueError("store_cert and store_key must be given together")
        if self.store_cert and self.store_ca is None:
            raise ValueError("store_cert needs store_ca")
        if bool(self.store_user) != (self.store_password is not None):
            raise ValueError("store_user and store_password must be given together")
