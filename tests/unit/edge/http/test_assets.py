"""The default voice and the presets that an operator offers to clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pybase64
import pytest
import soundfile

from duplane.edge.content.assets import load_assets
from duplane.edge.content.default_voice import default_voice


def write_sound(path: Path, seconds: float = 0.5) -> Path:
    soundfile.write(path, np.full(int(24_000 * seconds), 0.25, dtype=np.float32), 24_000)
    return path


def write_preset(directory: Path, file: str, **preset: Any) -> None:
    path = directory / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(orjson.dumps(preset))


def test_default_voice_is_told_at_the_rate_that_clients_send(tmp_path: Path) -> None:
    voice = load_assets(write_sound(tmp_path / "anna.wav"), None).default_voice
    assert voice
    assert {key: voice[key] for key in voice if key != "base64"} == {
        "name": "anna.wav",
        "duration": 0.5,
        "sample_rate": 16_000,
        "samples": 8_000,
    }
    assert len(pybase64.b64decode(str(voice["base64"]))) == 4 * 8_000


def test_presets_come_in_order_and_their_sound_apart(tmp_path: Path) -> None:
    write_sound(tmp_path / "anna.wav")
    write_preset(tmp_path, "omni/late.json", name="Late", order=2, ref_audio_path="anna.wav")
    parts = [{"type": "text", "text": "Hi"}, {"type": "audio", "path": "anna.wav"}]
    write_preset(tmp_path, "omni/early.json", id="first", order=1, system_content=parts)
    assets = load_assets(None, tmp_path)
    told = {"data": None, "name": "anna.wav", "duration": 0.5, "path": "anna.wav"}
    assert assets.presets == {
        "omni": [
            {"id": "first", "order": 1, "system_content": [parts[0], {"type": "audio", **told}]},
            {"id": "late", "name": "Late", "order": 2, "ref_audio": told},
        ]
    }
    sound: Any = assets.preset_audio["omni", "late"]["ref_audio"]
    assert (sound["name"], sound["duration"]) == ("anna.wav", 0.5)
    assert len(pybase64.b64decode(sound["data"])) == 4 * 8_000
    assert assets.preset_audio["omni", "first"] == {"system_content_audio": [sound]}


def test_without_settings_there_is_a_synthetic_voice_and_no_preset() -> None:
    assets = load_assets(None, None)
    assert (assets.presets, assets.preset_audio) == ({}, {})
    voice = assets.default_voice
    samples = np.frombuffer(pybase64.b64decode(str(voice["base64"])), "<f4")
    assert (voice["name"], voice["sample_rate"]) == ("duplane.wav", 16_000)
    assert voice["samples"] == len(samples) == 48_000
    assert 0.3 < np.abs(samples).max() < 0.5  # audible, and not clipped
    assert samples.tobytes() == default_voice().tobytes() == default_voice().tobytes()


def test_presets_may_be_yaml(tmp_path: Path) -> None:
    write_sound(tmp_path / "anna.wav")
    (tmp_path / "omni").mkdir()
    (tmp_path / "omni/talk.yaml").write_text(
        "name: Talk\norder: 1\nsince: 2026-04-01\nref_audio_path: anna.wav\n"
        "system_content:\n  - {type: text, text: 'Be brief.'}\n"
    )
    (tmp_path / "omni/notes.txt").write_text("not a preset")
    (preset,) = load_assets(None, tmp_path).presets["omni"]
    assert (preset["id"], preset["name"], preset["since"]) == ("talk", "Talk", "2026-04-01")
    assert preset["system_content"] == [{"type": "text", "text": "Be brief."}]
    (tmp_path / "omni/talk.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"talk\.yaml"):
        load_assets(None, tmp_path)


def test_sound_is_found_from_the_root_of_the_references_tree(tmp_path: Path) -> None:
    presets = tmp_path / "assets/presets"
    presets.mkdir(parents=True)
    (tmp_path / "assets/ref_audio").mkdir()
    write_sound(tmp_path / "assets/ref_audio/anna.wav")
    write_sound(tmp_path.parent / "secret.wav")
    write_preset(presets, "omni/a.json", ref_audio_path="assets/ref_audio/anna.wav")
    assets = load_assets(None, presets)
    told: Any = assets.presets["omni"][0]["ref_audio"]
    assert (told["name"], told["path"]) == ("anna.wav", "assets/ref_audio/anna.wav")
    assert assets.preset_audio["omni", "a"]["ref_audio"]
    write_preset(presets, "omni/a.json", ref_audio_path="../secret.wav")
    with pytest.raises(ValueError, match="outside"):
        load_assets(None, presets)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.wav"):
        load_assets(tmp_path / "missing.wav", None)
    with pytest.raises(ValueError, match="nowhere"):
        load_assets(None, tmp_path / "nowhere")
    inside = tmp_path / "presets"
    inside.mkdir()
    write_sound(tmp_path / "secret.wav")
    write_preset(inside, "omni/a.json", ref_audio_path="../secret.wav")
    with pytest.raises(ValueError, match="outside"):
        load_assets(None, inside)
    (inside / "omni/a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a\.json"):
        load_assets(None, inside)
    (inside / "omni/a.json").write_text("[]")
    with pytest.raises(ValueError, match=r"a\.json"):
        load_assets(None, inside)
