"""The verbs of `duplane certs`: make, show and check the certificates of a fabric."""

from __future__ import annotations

import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.types import ExistingDirectory, ExistingFile

from duplane.fabric.settings import Names, PositiveInt
from duplane.fabric.tls.identity import Identity, Role, parse_identity
from duplane.fabric.tls.settings import DEFAULT_TRUST_DOMAIN
from duplane.tools.command import CommandError, UsageError, app

certs = App(name="certs", help="Make, show and check the certificates of a fabric.")
app.command(certs)

_MAX_SHOWN_BYTES = 1024 * 1024


@certs.command
def dev(
    directory: Path,
    /,
    *,
    roles: Annotated[Names, Parameter("--role")] = tuple(Role),
    name: str = "",
    days: PositiveInt = 30,
    trust_domain: Annotated[str, Parameter("--fabric-trust-domain")] = DEFAULT_TRUST_DOMAIN,
) -> None:
    """Make certificates for a fabric: a CA, and one directory for each role.

    `--fabric-tls DIR/ROLE` uses them. If DIR has a CA, this CA issues new certificates, which
    running processes take into use. `ca.key` stays on the machine where it was made: who has it can
    make a certificate of any role.

    Parameters
    ----------
    directory
        Directory to write to; it is created if it is missing.
    roles
        Roles, separated by commas: scheduler, worker, edge, operator, client.
    name
        Name of the process in its certificate. The id of a worker must be this name, or begin with
        it and a dash. Default: the name of this host.
    days
        Days for which the certificates are valid.
    trust_domain
        Trust domain of the fabric.
    """
    from duplane.fabric.tls.issuing import CA_KEY_FILE, Authority, write_leaf

    host = name or socket.gethostname()
    identities = [_identity(trust_domain, role, host) for role in roles]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / CA_KEY_FILE).exists():
            authority = Authority.load(directory)
        else:
            authority = Authority.make()
            authority.save(directory)
        for identity in identities:
            chain, key = authority.issue(identity, timedelta(days=days))
            write_leaf(directory / identity.role, chain, key, authority.pem)
            sys.stdout.write(f"{directory / identity.role}: {identity}\n")
    except OSError as error:
        raise CommandError(f"{error.filename or directory}: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(str(error)) from None


@certs.command
def show(file: ExistingFile, /) -> None:
    """Show the certificates of a file: names, CA, validity and fingerprint.

    Parameters
    ----------
    file
        File with certificates (PEM), such as `tls.crt` or `ca.crt`.
    """
    from duplane.fabric.tls.certificates import parse_certificates
    from duplane.tools.certs.descriptions import description

    try:
        with file.open("rb") as opened:
            found = parse_certificates(opened.read(_MAX_SHOWN_BYTES), str(file))
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(str(error)) from None
    sys.stdout.write("\n".join(map(description, found)))


@certs.command
def check(
    directory: ExistingDirectory,
    /,
    *,
    role: Role | None = None,
    trust_domain: Annotated[str, Parameter("--fabric-trust-domain")] = DEFAULT_TRUST_DOMAIN,
) -> int:
    """Check the files of a process, as it and its peers do: names, key, CA and validity.

    Exit code: 0 if the process can use them, else 1.

    Parameters
    ----------
    directory
        Directory with `tls.crt`, `tls.key` and `ca.crt`, as for --fabric-tls.
    role
        Role that the certificate must have. Default: any role.
    trust_domain
        Trust domain of the fabric.
    """
    from duplane.fabric.tls.certificates import CA_FILE, identity_of, problems, read_files
    from duplane.tools.certs.descriptions import days_left, end

    try:
        files = read_files(directory)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from None
    found = list(problems(files, role=role, trust_domain=trust_domain))
    if found:
        raise CommandError(f"{directory}: {'; '.join(found)}")
    leaf = files.leaf
    sys.stdout.write(
        f"{identity_of(leaf)} is usable until {end(leaf)}, {days_left(leaf)};"
        f" {len(files.cas)} trusted in {CA_FILE}\n"
    )
    return 0


def _identity(trust_domain: str, role: str, name: str) -> Identity:
    try:
        return parse_identity(f"spiffe://{trust_domain}/duplane/{role}/{name}")
    except ValueError as error:
        raise UsageError(str(error)) from None
