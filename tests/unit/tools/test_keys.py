"""`duplane keys`: files of API keys that edges can read, with comments kept."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from support.tools.command import run_command

from duplane.edge.access import Scope
from duplane.edge.credentials.keys import parse_operator_keys, parse_tenant_keys
from duplane.tools.keys.key_text import with_disabled

NOW_S = 1_800_000_000.0


def new(file: Path, *arguments: str) -> str:
    """Make a key and return its text, which is the last line of the output."""
    code, output = run_command("keys", "new", str(file), *arguments)
    assert code == 0, output
    return output.splitlines()[-1]


def test_new_key_of_a_tenant_opens_and_the_file_has_only_its_hash(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    first = new(file, "--tenant", "acme")
    second = new(file, "--tenant", "acme", "--days", "30")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    text = file.read_text()
    for key in (first, second):
        assert key not in text
        assert key.rpartition("_")[2] not in text
    ring = parse_tenant_keys(text, NOW_S)
    found, expiring = ring.find(first), ring.find(second)
    assert found
    assert found.expires_s is None
    assert expiring
    assert expiring.expires_s


def test_third_live_key_is_refused_until_one_is_revoked(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    first = new(file, "--tenant", "acme")
    new(file, "--tenant", "acme")
    before = file.read_text()
    code, output = run_command("keys", "new", str(file), "--tenant", "acme")
    assert code == 2
    assert "3 live keys" in output
    assert file.read_text() == before
    assert run_command("keys", "revoke", str(file), first.split("_")[1])[0] == 0
    assert "disabled" in parse_tenant_keys(file.read_text(), NOW_S).problem(
        first.split("_")[1], NOW_S
    )
    new(file, "--tenant", "acme")


def test_key_of_an_operator_has_scopes(tmp_path: Path) -> None:
    file = tmp_path / "operators.toml"
    key = new(file, "--operator", "eve", "--scope", "read,sessions")
    found = parse_operator_keys(file.read_text(), NOW_S).find(key)
    assert found
    assert found.scopes == {Scope.READ, Scope.SESSIONS}
    assert "read,sessions" in run_command("keys", "list", str(file))[1]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--tenant", "a", "--operator", "b"),
        ("--tenant", "a b"),
        ("--tenant", 'a"\nx="'),
        ("--tenant", "a", "--scope", "read"),
        ("--operator", "eve"),
        ("--operator", "eve", "--scope", "all"),
        ("--tenant", "a", "--days", "0"),
    ],
)
def test_unusable_arguments_write_nothing(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    file = tmp_path / "keys.toml"
    assert run_command("keys", "new", str(file), *arguments)[0] == 2
    assert not file.exists()


def test_list_shows_ids_and_states_but_no_hash(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    key = new(file, "--tenant", "acme")
    key_id = key.split("_")[1]
    run_command("keys", "revoke", str(file), key_id)
    listed = run_command("keys", "list", str(file))[1]
    assert key_id in listed
    assert "disabled" in listed
    assert parse_tenant_keys(file.read_text(), NOW_S).keys[key_id].digest.hex() not in listed


def test_unknown_key_and_bad_file_are_named(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("[tenants.a]\n")
    code, output = run_command("keys", "revoke", str(file), "0123456789ab")
    assert (code, "there is no key '0123456789ab'" in output) == (2, True)
    file.write_text("[[keys]]\n")
    code, output = run_command("keys", "list", str(file))
    assert (code, "keys[0].id must" in output) == (2, True)


def test_mode_of_the_file_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    new(file, "--tenant", "acme")
    file.chmod(0o640)  # as an operator does
    new(file, "--tenant", "acme")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def entry(key_id: str, rest: str = "") -> str:
    return f'[[keys]]\nid = "{key_id}"  # a comment\n{rest}sha256 = "{"0" * 64}"\ntenant = "a"\n'


@pytest.mark.parametrize("rest", ["", "disabled = false\n", "disabled = false # not now\n"])
def test_only_the_named_key_is_disabled_and_comments_stay(rest: str) -> None:
    text = f"# head\n[tenants.a]\nsessions = 1\n\n{entry('a' * 12)}{entry('b' * 12, rest)}# end\n"
    changed = with_disabled(text, "b" * 12)
    keys = parse_tenant_keys(changed, NOW_S).keys
    assert {key.key_id: key.is_disabled for key in keys.values()} == {
        "a" * 12: False,
        "b" * 12: True,
    }
    for kept in ("# head", "# a comment", "# end"):
        assert changed.count(kept) == text.count(kept)


def test_key_in_an_unusual_form_is_left_to_its_author() -> None:
    key_id = "a" * 12
    text = f'keys = [{{ id = "{key_id}", sha256 = "{"0" * 64}", tenant = "a" }}]\n'
    with pytest.raises(ValueError, match="by hand"):
        with_disabled(text, key_id)
