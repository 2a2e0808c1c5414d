"""Checks the settings of a scheduler before it serves: nothing is open that nobody has allowed."""

from __future__ import annotations

from duplane.fabric.exposure import (
    check_fabric_exposure,
    check_metrics_exposure,
    peers_beyond_loopback,
)
from duplane.fabric.process import StartError
from duplane.fabric.secret_files import check_secret_files
from duplane.scheduler.settings import SchedulerSettings
from duplane.scheduler.store.url import parse_url


async def check_start(settings: SchedulerSettings) -> str:
    """Raise StartError, which names the flag to use, if a setting leaves something open.

    Returns a warning about connections without TLS; empty if there is nothing to warn of.
    """
    try:
        check_secret_files(
            signing_key=settings.signing_key,
            store_key=settings.store_key,
            store_password=settings.store_password,
        )
    except ValueError as error:
        raise StartError(str(error)) from None
    await check_metrics_exposure(settings.metrics_listen, is_public_allowed=settings.metrics_public)
    warnings = (
        await check_fabric_exposure(settings.listen, (), settings.fabric),
        await _store_warning(settings),
    )
    return "; ".join(warning for warning in warnings if warning)


async def _store_warning(settings: SchedulerSettings) -> str:
    """Return a warning if etcd is on another machine and is called without TLS."""
    etcd = parse_url(settings.store)
    if etcd is None or settings.store_ca or not await peers_beyond_loopback(etcd.addresses):
        return ""
    return (
        "connections to etcd have no TLS: anyone in between can replace the keys that leases are"
        " verified with; use --store-ca"
    )
