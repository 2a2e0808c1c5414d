"""Makes CAs and certificates: of the processes of a fabric, and of an edge without another one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from duplane.fabric.tls.certificates import CA_FILE, CHAIN_FILE, KEY_FILE
from duplane.fabric.tls.identity import Identity, server_name

CA_KEY_FILE = "ca.key"
CA_DAYS = 3650
_EARLY = timedelta(days=1)  # certificates are valid from so long ago: clocks differ
_PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class Authority:
    """A CA: its certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(
        cls,
        life: timedelta = timedelta(days=CA_DAYS),
        constraints: x509.NameConstraints | None = None,
    ) -> Authority:
        """Make a new CA. Its name is unique, so that processes can trust two at the same time.

        It can sign only certificates for names that `constraints` allow.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        serial = x509.random_serial_number()
        name = _name(f"duplane-ca-{serial:x}"[:40])
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder(name, name, key.public_key(), serial)
            .not_valid_before(now - _EARLY)
            .not_valid_after(now + life)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(is_ca=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
        )
        if constraints:
            builder = builder.add_extension(constraints, critical=True)
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, directory: Path) -> Authority:
        """Read the CA of a directory. Raises OSError or ValueError."""
        certificate = x509.load_pem_x509_certificate((directory / CA_FILE).read_bytes())
        key = serialization.load_pem_private_key((directory / CA_KEY_FILE).read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{directory / CA_KEY_FILE} is not an ECDSA key")
        if key.public_key() != certificate.public_key():
            raise ValueError(f"{directory / CA_KEY_FILE} is not the key of {directory / CA_FILE}")
        return cls(certificate, key)

    def save(self, directory: Path) -> None:
        """Write the CA to a directory."""
        write_secret(directory / CA_KEY_FILE, key_pem(self.key))
        replace(directory / CA_FILE, self.pem)

    @property
    def pem(self) -> bytes:
        """The certificate."""
        return self.certificate.public_bytes(_PEM)

    def issue(
        self,
        identity: Identity,
        life: timedelta,
        *,
        key: CertificateIssuerPrivateKeyTypes | None = None,
        now: datetime | None = None,
    ) -> tuple[bytes, bytes]:
        """Return the certificate of a process, and its key.

        `key` is the process's key; by default a new one. The certificate begins at `now`.
        """
        names = [
            x509.UniformResourceIdentifier(str(identity)),
            x509.DNSName(server_name(identity.role)),
        ]
        return self.sign(names, f"duplane-{identity.role}", life, key=key, now=now)

    def sign(
        self,
        names: Sequence[x509.GeneralName],
        common_name: str,
        life: timedelta,
        *,
        key: CertificateIssuerPrivateKeyTypes | None = None,
        now: datetime | None = None,
    ) -> tuple[bytes, bytes]:
        """Return a certificate with these names, and its key."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        now = now or datetime.now(UTC)
        identifier = self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        certificate = (
            x509.CertificateBuilder(
                self.certificate.subject,
                _name(common_name),
                key.public_key(),
                x509.random_serial_number(),
            )
            .not_valid_before(now - _EARLY)
            .not_valid_after(now + life)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(is_ca=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier.value),
                critical=False,
            )
            .sign(self.key, hashes.SHA256())
        )
        return certificate.public_bytes(_PEM), key_pem(key)


def write_leaf(directory: Path, chain_pem: bytes, private_pem: bytes, ca_pem: bytes) -> None:
    """Write the files of one process. Each file is replaced as a whole, the certificate last."""
    directory.mkdir(parents=True, exist_ok=True)
    replace(directory / CA_FILE, ca_pem)
    write_secret(directory / KEY_FILE, private_pem)
    replace(directory / CHAIN_FILE, chain_pem)


def replace(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file, so that readers see the former or the new content."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:  # noqa: PTH123 - sets the mode
        file.write(content)
    fresh.replace(path)


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read."""
    replace(path, content, 0o600)


def key_pem(key: CertificateIssuerPrivateKeyTypes) -> bytes:
    """Return a key as PEM, without a password."""
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        encipher_only=False,
        decipher_only=False,
    )
