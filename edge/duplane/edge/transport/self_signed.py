"""A certificate of the edge's own, for browsers in its network that have no other way to trust it.

Browsers give a page the microphone only over TLS, and phones open WebSockets only to a server whose
certificate they trust. A person installs the small CA once on the phone; it signs the edge's
certificate. The CA can sign only names of this machine and of private networks, so a stolen key is
of no use for other sites.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import socket
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from pathlib import Path
from typing import Final

from cryptography import x509

from duplane.fabric.addresses import outgoing_addresses, parse_ip
from duplane.fabric.secret_files import check_secret_files
from duplane.fabric.tls.certificates import CA_FILE, CHAIN_FILE, KEY_FILE
from duplane.fabric.tls.issuing import CA_KEY_FILE, Authority, replace, write_secret

_log = logging.getLogger(__name__)

LEAF_LIFE: Final = timedelta(days=397)  # phones accept no longer life
_RENEWED_BEFORE: Final = timedelta(days=90)
_LOCK: Final = ".lock"
_NAME: Final = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)*")
_PRIVATE: Final = (
    *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"),
    *("::1/128", "fc00::/7", "fe80::/10"),
)
_Names = Sequence[x509.DNSName | x509.IPAddress]


@dataclass(frozen=True, slots=True)
class SelfSigned:
    """The files of a certificate of the edge's own."""

    directory: Path

    @property
    def chain(self) -> Path:
        """The certificate of the edge."""
        return self.directory / CHAIN_FILE

    @property
    def key(self) -> Path:
        """The key of the edge."""
        return self.directory / KEY_FILE

    @property
    def ca(self) -> Path:
        """The certificate of the CA, which browsers install."""
        return self.directory / CA_FILE


def own_names(hosts: Sequence[str]) -> _Names:
    """Return the names and addresses of this machine, and `hosts`, without wildcards for all."""
    machine = socket.gethostname().lower()
    names = {"localhost", machine, f"{machine.partition('.')[0]}.local"}
    addresses: set[IPv4Address | IPv6Address] = {IPv4Address("127.0.0.1"), IPv6Address("::1")}
    addresses.update(outgoing_addresses())
    for host in hosts:
        address = parse_ip(host)
        if address is None:
            names.add(host.lower())
        elif not address.is_unspecified:
            addresses.add(address)
    return [
        *(x509.DNSName(name) for name in sorted(names) if _NAME.fullmatch(name.removeprefix("*."))),
        *(x509.IPAddress(address) for address in sorted(addresses, key=str)),
    ]


def ensure(directory: Path, names: _Names, now: datetime | None = None) -> SelfSigned:
    """Return the files in `directory`. Make those that are missing, end soon or lack a name.

    Raises ValueError if other users can read the keys, or if the files cannot be used.
    """
    try:
        return _ensure(directory.expanduser(), names, now or datetime.now(UTC))
    except OSError as error:
        raise ValueError(f"tls_state: {directory}: {error.strerror or error}") from None


def _ensure(directory: Path, names: _Names, now: datetime) -> SelfSigned:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = SelfSigned(directory)
    with _locked(directory):  # several edges of this machine may start at the same time
        for path in (files.key, directory / CA_KEY_FILE):
            check_secret_files(tls_state=path if path.exists() else None)
        authority = _usable_authority(directory, names, now)
        if authority is None:
            authority = Authority.make(constraints=_constraints(names))
            authority.save(directory)
            files.chain.unlink(missing_ok=True)  # another CA has signed it
            _log.info("a new CA is in %s: install /ca.pem of this edge on each phone", directory)
        if not (files.key.exists() and _is_usable(files.chain, names, now)):
            chain, key = authority.sign(names, "duplane", LEAF_LIFE, now=now)
            write_secret(files.key, key)
            replace(files.chain, chain)
    return files


@contextlib.contextmanager
def _locked(directory: Path) -> Generator[None]:
    lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _usable_authority(directory: Path, names: _Names, now: datetime) -> Authority | None:
    """Return the CA of a directory if it can sign a certificate for these names now."""
    try:
        authority = Authority.load(directory)
    except FileNotFoundError:
        return None
    certificate = authority.certificate
    if certificate.not_valid_after_utc < now + LEAF_LIFE:
        return None
    try:
        found = certificate.extensions.get_extension_for_class(x509.NameConstraints)
    except x509.ExtensionNotFound:
        return None
    permitted = found.value.permitted_subtrees or ()
    is_covered = all(any(_covers(each, name) for each in permitted) for name in names)
    return authority if is_covered else None


def _constraints(names: _Names) -> x509.NameConstraints:
    permitted: list[x509.GeneralName] = [x509.DNSName("local")]
    for network in _PRIVATE:
        permitted.append(x509.IPAddress(ip_network(network)))
    for name in names:
        if isinstance(name, x509.DNSName):
            permitted.append(x509.DNSName(name.value.removeprefix("*.")))
        else:
            permitted.append(x509.IPAddress(ip_network(name.value)))
    return x509.NameConstraints(permitted, excluded_subtrees=None)


def _covers(permitted: x509.GeneralName, name: x509.DNSName | x509.IPAddress) -> bool:
    """Return whether a CA with this constraint may sign a name."""
    if isinstance(name, x509.DNSName):
        text = name.value.removeprefix("*.")
        return isinstance(permitted, x509.DNSName) and (
            text == permitted.value or text.endswith(f".{permitted.value}")
        )
    return (
        isinstance(permitted, x509.IPAddress)
        and isinstance(permitted.value, IPv4Network | IPv6Network)
        and isinstance(name.value, IPv4Address | IPv6Address)
        and name.value in permitted.value
    )


def _is_usable(chain: Path, names: _Names, now: datetime) -> bool:
    """Return whether a certificate has these names and does not end soon."""
    try:
        leaf = x509.load_pem_x509_certificates(chain.read_bytes())[0]
    except FileNotFoundError:
        return False
    found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return leaf.not_valid_after_utc > now + _RENEWED_BEFORE and set(names) <= set(found)
