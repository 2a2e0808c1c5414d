"""Texts about certificates, for `duplane certs`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cryptography import x509

from duplane.fabric.tls.certificates import TIME_FORMAT, dns_names, fingerprint, identity_of


def description(certificate: x509.Certificate) -> str:
    """Return the lines that describe a certificate."""
    try:
        names = str(identity_of(certificate))
    except ValueError:
        names = "none of a fabric"
    lines = (
        ("subject", certificate.subject.rfc4514_string()),
        ("issuer", certificate.issuer.rfc4514_string()),
        ("SPIFFE ID", names),
        ("DNS names", ", ".join(dns_names(certificate)) or "none"),
        ("valid from", f"{certificate.not_valid_before_utc:{TIME_FORMAT}}"),
        ("valid until", f"{end(certificate)}, {days_left(certificate)}"),
        ("fingerprint", fingerprint(certificate)),
    )
    return "".join(f"{name + ':':<13}{value}\n" for name, value in lines)


def end(certificate: x509.Certificate) -> str:
    """Return when the certificate ends."""
    return f"{certificate.not_valid_after_utc:{TIME_FORMAT}}"


def days_left(certificate: x509.Certificate) -> str:
    """Return the time until the certificate ends."""
    days = (certificate.not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1)
    return f"{days:.1f} days left"
