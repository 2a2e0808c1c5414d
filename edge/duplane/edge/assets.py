"""What an operator offers to clients to start from: a default voice, and presets. Read once.

A preset is a JSON object at `MODE/*.json` in a directory; it may name sound files, which are
looked up in that directory and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import orjson
import pybase64

from duplane.fabric.audio import INPUT_RATE_HERTZ, AudioError, pcm_from_samples, read_audio_file

_MAX_VOICE_S = 60.0
_UNORDERED = 999

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Assets:
    """Answers for `/api/default_ref_audio`, `/api/presets` and the sound of each preset."""

    default_voice: Json | None = None
    presets: Mapping[str, list[Json]] = field(default_factory=dict[str, list[Json]])
    preset_audio: Mapping[tuple[str, str], Json] = field(
        default_factory=dict[tuple[str, str], Json]
    )


def load_assets(default_voice: Path | None, presets: Path | None) -> Assets:
    """Read everything. Raises ValueError naming the file that cannot be used."""
    listed: dict[str, list[Json]] = {}
    audio: dict[tuple[str, str], Json] = {}
    for mode, preset in _read_presets(presets) if presets else ():
        assert presets
        audio[mode, str(preset["id"])] = _take_audio(preset, presets)
        listed.setdefault(mode, []).append(preset)
    for of_mode in listed.values():
        of_mode.sort(key=_order)
    return Assets(_default_voice(default_voice) if default_voice else None, listed, audio)


def _default_voice(path: Path) -> Json:
    sound = _read_sound(path)
    return {
        "name": sound["name"],
        "duration": sound["duration"],
        "sample_rate": INPUT_RATE_HERTZ,
        "samples": sound["samples"],
        "base64": sound["data"],
    }


def _read_presets(directory: Path) -> Iterator[tuple[str, Json]]:
    if not directory.is_dir():
        raise ValueError(f"presets: {directory} is no directory")
    for path in sorted(directory.glob("*/*.json")):
        try:
            preset: object = orjson.loads(path.read_bytes())
        except (OSError, orjson.JSONDecodeError) as error:
            raise ValueError(f"presets: {path}: {error}") from None
        if not isinstance(preset, dict):
            raise ValueError(f"presets: {path} is no JSON object")
        yield path.parent.name, {"id": path.stem, **cast(Json, preset)}


def _take_audio(preset: Json, directory: Path) -> Json:
    """Move the sound out of a preset, leaving its name and duration, and return it."""
    audio: Json = {}
    if "ref_audio_path" in preset:
        sound = _read_within(directory, preset["ref_audio_path"])
        preset["ref_audio"] = {**_without_data(sound), "path": preset.pop("ref_audio_path")}
        audio["ref_audio"] = _with_data(sound)
    content = preset.get("system_content")
    if isinstance(content, list):
        parts = cast(list[object], content)
        sounds: list[Json] = []
        for index, part in enumerate(parts):
            if not isinstance(part, dict):
                continue
            item = cast(Json, part)
            if item.get("type") == "audio" and "path" in item:
                sound = _read_within(directory, item["path"])
                parts[index] = {"type": "audio", "path": item["path"], **_without_data(sound)}
                sounds.append(_with_data(sound))
        audio["system_content_audio"] = sounds
    return audio


def _with_data(sound: Json) -> Json:
    return {"data": sound["data"], "name": sound["name"], "duration": sound["duration"]}


def _without_data(sound: Json) -> Json:
    return {"data": None, "name": sound["name"], "duration": sound["duration"]}


def _read_within(directory: Path, name: object) -> Json:
    path = (directory / str(name)).resolve()
    if not path.is_relative_to(directory.resolve()):
        raise ValueError(f"presets: {name} is outside of {directory}")
    return _read_sound(path)


def _read_sound(path: Path) -> Json:
    try:
        samples = read_audio_file(path, max_s=_MAX_VOICE_S)
    except (AudioError, OSError) as error:
        raise ValueError(f"{path}: {error}") from None
    return {
        "name": path.name,
        "duration": len(samples) / INPUT_RATE_HERTZ,
        "samples": len(samples),
        "data": pybase64.b64encode_as_string(pcm_from_samples(samples)),
    }


def _order(preset: Json) -> float:
    order = preset.get("order", _UNORDERED)
    return order if isinstance(order, int | float) else _UNORDERED
