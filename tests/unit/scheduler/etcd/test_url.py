"""URLs of etcd clusters."""

from __future__ import annotations

import pytest

from duplane.scheduler.etcd.credentials import Credentials
from duplane.scheduler.etcd.url import DEFAULT_PREFIX, EtcdUrl


def test_url_names_members_and_prefix() -> None:
    one = EtcdUrl.parse("etcd://host:2379")
    assert (one.addresses, one.prefix) == (("host:2379",), DEFAULT_PREFIX)
    three = EtcdUrl.parse("etcd://a:1,[::1]:2,c:3?prefix=/blue/")
    assert (three.addresses, three.prefix) == (("a:1", "[::1]:2", "c:3"), "/blue/")


@pytest.mark.parametrize(
    "url",
    [
        "etcd:",
        "etcd://",
        "etcd://host",
        "etcd://host:2379/path",
        "etcd://host:2379?prefix=",
        "etcd://host:2379?ttl=5",
        "etcd://a:1,,b:2",
        "etcd://host:2379?prefix=/a/&prefix=/b/",
        "http://host:2379",
    ],
)
def test_other_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be used|must be host:port|may follow"):
        EtcdUrl.parse(url)


@pytest.mark.parametrize(
    "url",
    [
        "etcd://root:secret@host:2379",
        "http://root:secret@host",
        "etcd://a:1,root:secret@b:2?prefix=/x/",
        "etcd://host:2379?password=secret",
    ],
)
def test_error_does_not_show_what_may_be_a_password(url: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be used|may follow") as refused:
        EtcdUrl.parse(url)
    assert "secret" not in str(refused.value)


def test_password_is_not_shown() -> None:
    assert "secret" not in repr(Credentials(user="root", password="secret"))
