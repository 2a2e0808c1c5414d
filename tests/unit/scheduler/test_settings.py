"""Settings of a scheduler: bounds, addresses, signing key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from duplane.scheduler.key_files import open_signer
from duplane.scheduler.settings import SchedulerSettings


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"listen": "nowhere"}, "listen"),
        ({"listen": "host:70000"}, "listen"),
        ({"listen": ":80"}, "listen"),
        ({"ticket_limit": 0}, "ticket_limit"),
        ({"claim_timeout_s": -1.0}, "claim_timeout_s"),
        ({"claim_timeout_s": 61.0}, "claim_timeout_s is 61.0, must not be above 60"),
        ({"report_interval_s": float("nan")}, "report_interval_s"),
        ({"store": "etcd:"}, "store: "),
        ({"store": "etcd://host"}, "store: host is 'host', must be host:port"),
        ({"store_user": "root"}, "store_user and store_password"),
        ({"store_cert": Path(__file__)}, "store_cert and store_key"),
        ({"store": "sqlite:x"}, "store"),
    ],
)
def test_invalid_setting_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}"):
        SchedulerSettings(**given)


def test_unusable_key_is_named(tmp_path: Path) -> None:
    rsa, garbage = tmp_path / "rsa.pem", tmp_path / "garbage.pem"
    for path in (rsa, garbage):
        path.touch(0o600)
    key = generate_private_key(65537, 2048)
    rsa.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    garbage.write_text("no key")
    for path in (tmp_path / "absent.pem", rsa, garbage):
        with pytest.raises(ValueError, match=f"^signing_key: {path}"):
            open_signer(SchedulerSettings(signing_key=path))


def test_new_key_is_generated_when_none_is_given() -> None:
    keys = [open_signer(SchedulerSettings()).verification_key.public_key for _ in range(2)]
    assert keys[0] != keys[1]
