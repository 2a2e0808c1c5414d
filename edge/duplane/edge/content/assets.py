"""The default voice and the presets that an operator offers to clients, read once at the start.

A preset is an object in a file `MODE/*.json` or `MODE/*.yaml` of a directory. A preset may name
audio files within that directory. In the tree of the reference this directory is `assets/presets`,
and the names of audio files are relative to the tree's root, so they are also found there. If the
operator gives no sound file, the default voice is synthetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import orjson
import pybase64
import yaml

from duplane.edge.content.default_voice import NAME
from duplane.edge.content.default_voice import default_voice as synthetic_voice
from duplane.edge.payload.rates import VOICE_RATE_HERTZ
from duplane.fabric.audio import (
    AudioError,
    Samples,
    pcm_from_samples,
    read_audio_file,
)

_MAX_VOICE_S = 60.0
_UNORDERED = 999
_REFERENCE_FOLDER = Path("assets/presets")  # of the presets in the tree of the reference
_PRESET_FORMATS = frozenset({".json", ".yaml", ".yml"})

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Assets:
    """The answers of `/api/default_ref_audio` and `/api/presets`, and the audio of each preset."""

    default_voice: Json
    presets: Mapping[str, list[Json]] = field(default_factory=dict[str, list[Json]])
    preset_audio: Mapping[tuple[str, str], Json] = field(
        default_factory=dict[tuple[str, str], Json]
    )


def load_assets(default_voice: Path | None, presets: Path | None) -> Assets:
    """Read the default voice and the presets. Raises ValueError that names the invalid file."""
    listed: dict[str, list[Json]] = {}
    audio: dict[tuple[str, str], Json] = {}
    if presets:
        for mode, preset in _read_presets(presets):
            audio[mode, str(preset["id"])] = _extract_audio(preset, presets)
            listed.setdefault(mode, []).append(preset)
    for presets_of_mode in listed.values():
        presets_of_mode.sort(key=_order)
    clip = _read_audio(default_voice) if default_voice else _clip(NAME, synthetic_voice())
    return Assets(_voice(clip), listed, audio)


def _voice(clip: Json) -> Json:
    return {
        "name": clip["name"],
        "duration": clip["duration"],
        "sample_rate": VOICE_RATE_HERTZ,
        "samples": clip["samples"],
        "base64": clip["data"],
    }


def _read_presets(directory: Path) -> Iterator[tuple[str, Json]]:
    if not directory.is_dir():
        raise ValueError(f"presets: {directory} is not a directory")
    for path in sorted(path for path in directory.glob("*/*") if path.suffix in _PRESET_FORMATS):
        try:
            preset = _parse_preset(path)
        except (OSError, orjson.JSONDecodeError, yaml.YAMLError, TypeError) as error:
            raise ValueError(f"presets: {path}: {error}") from None
        if not isinstance(preset, dict):
            raise ValueError(f"presets: {path} is not an object")
        yield path.parent.name, {"id": path.stem, **cast(Json, preset)}


def _parse_preset(path: Path) -> object:
    if path.suffix == ".json":
        return orjson.loads(path.read_bytes())
    # YAML has types that JSON lacks, such as dates. Values of these types become text.
    return orjson.loads(orjson.dumps(yaml.safe_load(path.read_bytes())))


def _extract_audio(preset: Json, directory: Path) -> Json:
    """Remove the audio from a preset and return it.

    The preset keeps the audio's name and duration.
    """
    audio: Json = {}
    if "ref_audio_path" in preset:
        clip = _read_within(directory, preset["ref_audio_path"])
        preset["ref_audio"] = {**_without_data(clip), "path": preset.pop("ref_audio_path")}
        audio["ref_audio"] = _with_data(clip)
    content = preset.get("system_content")
    if isinstance(content, list):
        parts = cast(list[object], content)
        clips: list[Json] = []
        for index, part in enumerate(parts):
            if not isinstance(part, dict):
                continue
            item = cast(Json, part)
            if item.get("type") == "audio" and "path" in item:
                clip = _read_within(directory, item["path"])
                parts[index] = {"type": "audio", "path": item["path"], **_without_data(clip)}
                clips.append(_with_data(clip))
        audio["system_content_audio"] = clips
    return audio


def _with_data(clip: Json) -> Json:
    return {"data": clip["data"], "name": clip["name"], "duration": clip["duration"]}


def _without_data(clip: Json) -> Json:
    return {"data": None, "name": clip["name"], "duration": clip["duration"]}


def _read_within(directory: Path, name: object) -> Json:
    root = directory.resolve()
    folder = root
    if root.parts[-2:] == _REFERENCE_FOLDER.parts and not (root / str(name)).exists():
        folder = root.parents[1]
    path = (folder / str(name)).resolve()
    if not path.is_relative_to(folder):
        raise ValueError(f"presets: {name} is outside of {folder}")
    return _read_audio(path)


def _read_audio(path: Path) -> Json:
    try:
        samples = read_audio_file(path, rate_hertz=VOICE_RATE_HERTZ, max_s=_MAX_VOICE_S)
    except (AudioError, OSError) as error:
        raise ValueError(f"{path}: {error}") from None
    return _clip(path.name, samples)


def _clip(name: str, samples: Samples) -> Json:
    return {
        "name": name,
        "duration": len(samples) / VOICE_RATE_HERTZ,
        "samples": len(samples),
        "data": pybase64.b64encode_as_string(pcm_from_samples(samples)),
    }


def _order(preset: Json) -> float:
    order = preset.get("order", _UNORDERED)
    return order if isinstance(order, int | float) else _UNORDERED
