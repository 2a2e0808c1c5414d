"""Reads the certificates of a process, and finds what would make them fail. Pure but for reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID

from duplane.fabric.tls.identity import Identity, Role, parse_identity, server_name

CHAIN_FILE, KEY_FILE, CA_FILE = "tls.crt", "tls.key", "ca.crt"
TIME_FORMAT = "%Y-%m-%d %H:%M:%S UTC"
MAX_FILE_BYTES = 1024 * 1024  # a longer file is no certificate, key or bundle
_MAX_CHAIN_LENGTH = 8


@dataclass(frozen=True)
class CertificateFiles:
    """The files of one process, as PEM, and what they contain."""

    chain_pem: bytes
    key_pem: bytes
    ca_pem: bytes
    chain: Sequence[x509.Certificate]
    cas: Sequence[x509.Certificate]

    @property
    def leaf(self) -> x509.Certificate:
        """The certificate of the process."""
        return self.chain[0]


def read_files(directory: Path) -> CertificateFiles:
    """Read the files of a directory. Raises OSError or ValueError, which names the file."""
    names = (CHAIN_FILE, KEY_FILE, CA_FILE)
    chain_pem, key_pem, ca_pem = (_read(directory / name) for name in names)
    chain = parse_certificates(chain_pem, str(directory / CHAIN_FILE))
    cas = parse_certificates(ca_pem, str(directory / CA_FILE))
    check_pair(chain_pem, key_pem, str(directory / KEY_FILE))
    return CertificateFiles(chain_pem, key_pem, ca_pem, chain, cas)


def check_pair(chain_pem: bytes, key_pem: bytes, name: str) -> None:
    """Check that a key belongs to the first certificate of a chain (PEM).

    Raises ValueError that begins with `name`, the name of the key.
    """
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
        leaf_key = x509.load_pem_x509_certificates(chain_pem)[0].public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        # The text of these errors says why the key cannot be read, and has nothing of the key.
        raise ValueError(f"{name}: {error}") from None
    if _public_bytes(key.public_key()) != _public_bytes(leaf_key):
        raise ValueError(f"{name}: it is not the key of the certificate")


def parse_certificates(pem: bytes, name: str) -> Sequence[x509.Certificate]:
    """Return the certificates of a PEM file, at least one. Raises ValueError that names it."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def identity_of(leaf: x509.Certificate) -> Identity:
    """Return the process that a certificate names. Raises ValueError if it names none, or two."""
    uris = _names(leaf, x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise ValueError(f"the certificate has {len(uris)} URIs, must have one SPIFFE ID")
    return parse_identity(uris[0])


def dns_names(leaf: x509.Certificate) -> Sequence[str]:
    """Return the DNS names of a certificate."""
    return _names(leaf, x509.DNSName)


def fingerprint(certificate: x509.Certificate) -> str:
    """Return the fingerprint as a deny list has it."""
    return f"sha256:{certificate.fingerprint(hashes.SHA256()).hex()}"


def problems(
    files: CertificateFiles,
    now: datetime | None = None,
    *,
    role: Role | None = None,
    trust_domain: str | None = None,
) -> Iterator[str]:
    """Yield why processes of the fabric would refuse the certificate; nothing if they accept it.

    If `role` or `trust_domain` is given, the certificate must have it.
    """
    leaf, now = files.leaf, now or datetime.now(UTC)
    yield from _problems_of_names(leaf, role, trust_domain)
    if not _is_supported(leaf.public_key()):
        yield "the key is neither RSA nor ECDSA on P-256, P-384 or P-521; gRPC supports no other"
    if now >= leaf.not_valid_after_utc:
        yield f"the certificate has expired at {leaf.not_valid_after_utc:{TIME_FORMAT}}"
    if now < leaf.not_valid_before_utc:
        yield f"the certificate is valid only from {leaf.not_valid_before_utc:{TIME_FORMAT}}"
    yield from _problems_of_usage(leaf)
    if not _is_issued(files.chain, files.cas, now):
        yield f"no valid certificate in {CA_FILE} has issued the certificate"
    yield from _problems_of_bundle(files.cas)


def _is_supported(key: PublicKeyTypes) -> bool:
    """Return whether gRPC can use a key."""
    if isinstance(key, ec.EllipticCurvePublicKey):
        return isinstance(key.curve, ec.SECP256R1 | ec.SECP384R1 | ec.SECP521R1)
    return isinstance(key, rsa.RSAPublicKey)


def _problems_of_names(
    leaf: x509.Certificate, role: Role | None, trust_domain: str | None
) -> Iterator[str]:
    try:
        identity = identity_of(leaf)
    except ValueError as error:
        yield str(error)
        return
    if role and identity.role is not role:
        yield f"the certificate is for the role {identity.role}, must be for {role}"
    if trust_domain and identity.trust_domain != trust_domain:
        yield f"the certificate has the trust domain {identity.trust_domain}, not {trust_domain}"
    if server_name(identity.role) not in dns_names(leaf):
        yield f"the certificate lacks the DNS name {server_name(identity.role)}"


def _problems_of_usage(leaf: x509.Certificate) -> Iterator[str]:
    try:
        usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return  # then every usage is allowed
    needed = (
        (ExtendedKeyUsageOID.CLIENT_AUTH, "clientAuth"),
        (
            ExtendedKeyUsageOID.SERVER_AUTH,
            "serverAuth",
        ),
    )
    for oid, name in needed:
        if oid not in usage:
            yield f"the extended key usage lacks {name}"


def _problems_of_bundle(cas: Sequence[x509.Certificate]) -> Iterator[str]:
    """Check that OpenSSL can tell several CAs apart; otherwise a rotation of the CA fails."""
    if len(cas) < 2:
        return
    if len({ca.subject.public_bytes() for ca in cas}) < len(cas):
        yield f"two certificates in {CA_FILE} have the same subject"
    for ca in cas:
        try:
            ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        except x509.ExtensionNotFound:
            yield f"{ca.subject.rfc4514_string()} in {CA_FILE} has no subject key identifier"


def _is_issued(
    chain: Sequence[x509.Certificate], cas: Sequence[x509.Certificate], now: datetime
) -> bool:
    """Return whether the chain leads from its first certificate to a valid one of `cas`."""
    current = chain[0]
    for _ in range(_MAX_CHAIN_LENGTH):
        if any(_has_issued(ca, current, now) for ca in cas):
            return True
        current = next((one for one in chain[1:] if _has_issued(one, current, now)), None)
        if current is None:
            return False
    return False


def _has_issued(issuer: x509.Certificate, issued: x509.Certificate, now: datetime) -> bool:
    try:
        issued.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return issuer.not_valid_before_utc <= now < issuer.not_valid_after_utc


def _names(
    leaf: x509.Certificate, kind: type[x509.UniformResourceIdentifier] | type[x509.DNSName]
) -> Sequence[str]:
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return names.get_values_for_type(kind)


def _public_bytes(key: PublicKeyTypes) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(serialization.Encoding.DER, form)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{path} is longer than {MAX_FILE_BYTES} bytes")
    return content
