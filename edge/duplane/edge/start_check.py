"""Checks the settings of an edge before it serves: nothing is open that nobody has allowed.

An edge that only this machine can reach needs no credential and no flag.
"""

from __future__ import annotations

from collections.abc import Sequence

from duplane.edge.settings import EdgeSettings
from duplane.fabric.exposure import (
    addresses_beyond_loopback,
    check_fabric_exposure,
    check_metrics_exposure,
)
from duplane.fabric.process import StartError
from duplane.fabric.secret_files import check_secret_files


async def check_start(settings: EdgeSettings) -> str:
    """Raise StartError, which names the flag to use, if a setting leaves something open.

    Returns a warning about connections to the fabric; empty if there is nothing to warn of.
    """
    recording = settings.recording
    if recording and recording.max_age_s is None:
        raise StartError(
            "--record needs --record-days DAYS, which deletes older recordings; say"
            " --record-days unlimited to keep them until somebody deletes them"
        )
    try:
        check_secret_files(tls_key=settings.tls_key)
    except ValueError as error:
        raise StartError(str(error)) from None
    await check_metrics_exposure(settings.metrics_listen, is_public_allowed=settings.metrics_public)
    await check_clients(settings)
    return await check_fabric_exposure(None, settings.schedulers, settings.fabric)


async def is_public(settings: EdgeSettings) -> bool:
    """Return whether clients on other machines can reach the edge, maybe through a proxy."""
    return settings.behind_tls_proxy or bool(await _open_addresses(settings))


async def _open_addresses(settings: EdgeSettings) -> Sequence[str]:
    """Return the settings, as host:port, to which other machines can connect."""
    listens = [each for each in (settings.listen, settings.operator_listen) if each]
    return [each for each in listens if await addresses_beyond_loopback(each)]


async def check_clients(settings: EdgeSettings) -> None:
    """Check how clients reach the edge and what they must show. Raises StartError."""
    open_addresses = await _open_addresses(settings)
    has_tls = settings.tls_cert is not None or settings.tls_self_signed
    if open_addresses and not has_tls and not settings.behind_tls_proxy:
        raise StartError(
            f"other machines can connect to {open_addresses[0]} without TLS: give a certificate"
            " with --tls-cert and --tls-key, let the edge make one with --tls-self-signed, or say"
            " --behind-tls-proxy if a proxy ends TLS"
        )
    is_open = bool(open_addresses) or settings.behind_tls_proxy
    credentials = settings.credentials
    if is_open and not credentials.are_required and credentials.auth != "none":
        raise StartError(
            f"other machines can reach {settings.listen} without a credential: give API keys with"
            " --api-keys FILE or an issuer of tokens with --jwks URL, or say --auth none"
        )
