"""Sources of voices and recordings: how they are fetched, and which of them training refuses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from support.tools.command import captured

from duplane.tools.command import UsageError
from training import __main__ as command
from training.__main__ import run
from training.domain import DIGITS
from training.evaluation.material import Material, MissingError
from training.sources.catalogue import SOURCES, Archive, Source, source_named
from training.sources.fetching import FetchError, fetch_source, find_source, folder_of
from training.sources.recordings import recordings_of

CONTENT = b"package"
APT = """#!/bin/sh
echo "$*" >> {log}
printf package > "$(echo $2 | tr =: __).deb"
"""
UNPACK = """#!/bin/sh
test -s "$2" && echo unpacked > "$3/sound"
"""

Registry = Callable[[], list[str]]


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Act as Debian's clients; return the calls of apt-get."""
    log, folder = tmp_path / "log", tmp_path / "commands"
    folder.mkdir()
    for name, script in (("apt-get", APT.format(log=log)), ("dpkg-deb", UNPACK)):
        (folder / name).write_text(script, encoding="utf-8")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return lambda: log.read_text(encoding="utf-8").splitlines() if log.exists() else []


def source(digest: str = hashlib.sha256(CONTENT).hexdigest()) -> Source:
    return Source("speech", "words", "MIT", (Archive("debian", "speech-en", "1:2.0", digest),))


def test_a_source_is_fetched_once_and_unpacked(tmp_path: Path, registry: Registry) -> None:
    cache = tmp_path / "cache"
    folder = fetch_source(source(), cache)
    assert (folder / "sound").read_text(encoding="utf-8") == "unpacked\n"
    assert fetch_source(source(), cache) == folder == folder_of(source(), cache)
    assert registry() == ["download speech-en=1:2.0"]
    assert list(cache.iterdir()) == [folder]


def test_another_digest_is_refused_and_leaves_nothing(tmp_path: Path, registry: Registry) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(FetchError, match=r"speech-en 1:2\.0 has the digest [0-9a-f]{64}"):
        fetch_source(source("0" * 64), cache)
    assert registry()
    assert list(cache.iterdir()) == []


def test_missing_client_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FetchError, match="apt-get is not installed"):
        fetch_source(source(), tmp_path / "cache")


def test_command_names_licence_digest_and_failures(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    del registry
    monkeypatch.setattr(command, "SOURCES", (source(), source("0" * 64)))
    code, output = captured(run, ("fetch", "--cache", str(tmp_path / "cache")))
    assert code == 1
    assert "speech: words; MIT; for training and judging\n" in output
    assert f"  speech-en 1:2.0 sha256 {hashlib.sha256(CONTENT).hexdigest()}\n" in output
    assert "  not fetched: speech-en 1:2.0 has the digest" in output


def test_every_source_names_its_licence_and_full_digests() -> None:
    assert len({one.name for one in SOURCES}) == len(SOURCES)
    for one in SOURCES:
        assert one.licence
        assert all(len(bytes.fromhex(archive.sha256)) == 32 for archive in one.archives)


def test_training_refuses_the_recordings_that_judge(tmp_path: Path) -> None:
    judging = {one.name for one in SOURCES if one.is_for_judging}
    assert {"asterisk", "linphone"} <= judging
    for name in judging:
        assert find_source(name, tmp_path, "judging") is None
        folder_of(source_named(name, "judging"), tmp_path).mkdir()
        assert find_source(name, tmp_path, "judging") is not None
        with pytest.raises(UsageError, match="only judges a model, training must not use it"):
            find_source(name, tmp_path, "training")
    assert find_source("kokoro", tmp_path, "training") is None


def test_unknown_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="source is 'noise', must be one of kokoro, rooms"):
        find_source("noise", tmp_path, "training")


def test_rows_name_the_source_that_is_missing(tmp_path: Path) -> None:
    material = Material(tmp_path)
    with pytest.raises(MissingError, match="the source klettres is not fetched"):
        material.say()
    with pytest.raises(MissingError, match="no --recordings are named"):
        material.digits()


def record(folder: Path, *speakers: str) -> None:
    for speaker in speakers:
        for digit in range(len(DIGITS)):
            (folder / f"{digit}_{speaker}_{digit}.wav").touch()


def test_speakers_are_for_training_or_for_judging(tmp_path: Path) -> None:
    record(tmp_path, "ann", "bob", "cid", "dan", "eva")
    (tmp_path / "README.md").touch()
    judged, trained = recordings_of(tmp_path, "judging"), recordings_of(tmp_path, "training")
    assert set(judged.digits) == {"ann", "dan"}
    assert set(trained.digits) == {"bob", "cid", "eva"}
    assert judged.digits["ann"]["seven"] == [tmp_path / "7_ann_7.wav"]
    assert not judged.words


def test_speakers_of_single_words_are_for_training_or_for_judging(tmp_path: Path) -> None:
    for word, speakers in (("seven", "abcd"), ("stop", "bde"), ("_noise_", "ab")):
        (tmp_path / word).mkdir()
        for speaker in speakers:
            (tmp_path / word / f"{speaker}_nohash_0.wav").touch()
    (tmp_path / "seven" / "README.wav").touch()
    judged, trained = recordings_of(tmp_path, "judging"), recordings_of(tmp_path, "training")

    def speakers_of(takes: Mapping[str, list[Path]]) -> dict[str, str]:
        return {word: "".join(path.name[0] for path in paths) for word, paths in takes.items()}

    assert speakers_of(judged.words) == {"seven": "ad", "stop": "d"}
    assert speakers_of(trained.words) == {"seven": "bc", "stop": "be"}
    assert not judged.digits


def test_folder_without_digits_is_refused(tmp_path: Path) -> None:
    (tmp_path / "seven.wav").touch()
    with pytest.raises(UsageError, match=r"no file is named DIGIT_SPEAKER_NUMBER\.wav"):
        recordings_of(tmp_path, "judging")


def test_speaker_who_lacks_a_digit_is_named(tmp_path: Path) -> None:
    record(tmp_path, "ann", "bob")
    (tmp_path / "4_bob_4.wav").unlink()
    with pytest.raises(UsageError, match="bob never says four"):
        recordings_of(tmp_path, "training")
