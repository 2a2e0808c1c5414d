"""Why a credential is not accepted."""

from __future__ import annotations


class RefusedLoginError(Exception):
    """A credential is refused.

    The message is for its sender. It quotes nothing of the credential, and tells nothing of other
    credentials.
    """


class IssuerUnreachableError(Exception):
    """A credential cannot be checked, because the keys of its issuer cannot be fetched."""
