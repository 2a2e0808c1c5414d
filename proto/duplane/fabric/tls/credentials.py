"""The certificate of a process, for the servers and channels of gRPC. It changes while they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
from cryptography.x509 import Certificate

from duplane.fabric.process import StartError
from duplane.fabric.secret_files import check_secret_file
from duplane.fabric.tls.certificates import (
    CA_FILE,
    CHAIN_FILE,
    KEY_FILE,
    CertificateFiles,
    identity_of,
    problems,
    read_files,
)
from duplane.fabric.tls.deny_list import DenyList
from duplane.fabric.tls.identity import Identity, Role
from duplane.fabric.tls.settings import FabricTlsSettings
from duplane.fabric.watched_files import WatchedFiles


class FabricCredentials(WatchedFiles):
    """The certificate, the key and the trusted CAs of one process.

    `version` rises with each change. Servers use the present files for each new connection; a
    channel keeps the files with which it was opened. Raises ValueError if the files cannot be used.
    """

    def __init__(
        self, directory: Path, role: Role, trust_domain: str, deny_list: DenyList | None = None
    ) -> None:
        self.directory = directory
        self._role = role
        self.trust_domain = trust_domain
        self.deny_list = deny_list
        self.version = 0
        paths = [directory / name for name in (CHAIN_FILE, KEY_FILE, CA_FILE)]
        check_secret_file(directory / KEY_FILE, "fabric_tls")
        try:
            super().__init__(f"certificates in {directory}", paths)
        except ValueError as error:
            raise ValueError(f"fabric_tls: {error}") from None

    @property
    def identity(self) -> Identity:
        """The name of this process."""
        return identity_of(self._files.leaf)

    @property
    def leaf(self) -> Certificate:
        """The present certificate."""
        return self._files.leaf

    @property
    def watched_files(self) -> Sequence[WatchedFiles]:
        """The files to watch."""
        return (self, self.deny_list) if self.deny_list else (self,)

    def read(self) -> None:
        """Read the files. Raises ValueError if a peer would refuse them."""
        files = read_files(self.directory)
        found = list(problems(files, role=self._role, trust_domain=self.trust_domain))
        if found:
            raise ValueError(f"{self.directory}: {'; '.join(found)}")
        self._files: CertificateFiles = files
        self.version += 1
        self.channel_credentials = grpc.ssl_channel_credentials(
            files.ca_pem, files.key_pem, files.chain_pem
        )

    def server_credentials(
        self, on_handshake: Callable[[], None] = lambda: None
    ) -> grpc.ServerCredentials:
        """Return credentials that demand a certificate of a trusted CA from every client.

        gRPC asks for the present certificate before each handshake, in a thread of its own, which
        then also calls `on_handshake`.
        """
        given = self.version

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            on_handshake()
            version = self.version
            if version == given:
                return None  # no change
            given = version
            return self._configuration()

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            fetch,  # pyright: ignore[reportArgumentType]  gRPC takes None, its stub does not
            require_client_authentication=True,
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        files = self._files
        return grpc.ssl_server_certificate_configuration(
            [(files.key_pem, files.chain_pem)], files.ca_pem
        )


def open_credentials(settings: FabricTlsSettings, role: Role) -> FabricCredentials | None:
    """Return the credentials that the settings name; None without TLS. Raises StartError."""
    if settings.fabric_tls is None:
        return None
    try:
        deny_list = DenyList(settings.fabric_deny) if settings.fabric_deny else None
        return FabricCredentials(settings.fabric_tls, role, settings.fabric_trust_domain, deny_list)
    except ValueError as error:
        raise StartError(str(error)) from None
