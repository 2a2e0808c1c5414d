"""What waits are estimated from, in the words of the reference's `/api/config/eta`. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import cast

import orjson
from google.protobuf.duration_pb2 import Duration

from duplane.fabric.v1 import admin_pb2, lease_pb2

_KINDS = {
    "chat": lease_pb2.SESSION_KIND_CHAT,
    "audio_duplex": lease_pb2.SESSION_KIND_AUDIO_DUPLEX,
    "omni_duplex": lease_pb2.SESSION_KIND_OMNI_DUPLEX,
}
# Readers expect this kind too. No session is of it, so nothing follows from its numbers.
_UNSERVED = "half_duplex"
_UNSERVED_BASE_S = 180.0
_CONFIG = frozenset({*(f"eta_{name}_s" for name in (*_KINDS, _UNSERVED)), "ema_alpha"})
_MAX_S = 1e9  # what a Duration can hold; what is sensible is for the scheduler to say


def eta_status(estimates: admin_pb2.Estimates) -> dict[str, object]:
    """Render what a scheduler told."""
    holds = {hold.kind: hold for hold in estimates.holds}
    config: dict[str, object] = {}
    means: dict[str, object] = {}
    counts: dict[str, object] = {}
    for name in ("chat", _UNSERVED, "audio_duplex", "omni_duplex"):
        hold = holds.get(_KINDS[name]) if name in _KINDS else None
        config[f"eta_{name}_s"] = _seconds(hold.base_duration) if hold else _UNSERVED_BASE_S
        has_mean = hold is not None and hold.HasField("mean_duration")
        means[f"ema_{name}_s"] = _seconds(hold.mean_duration) if hold and has_mean else None
        counts[f"ema_{name}_samples"] = hold.sample_count if hold else 0
    config["ema_alpha"] = estimates.smoothing
    return {"config": config, "ema_alpha": estimates.smoothing, **means, **counts}


def read_eta(body: bytes) -> admin_pb2.UpdateEstimatesRequest:
    """Read any subset of the settings; null leaves a setting, like its absence.

    They may stand in `config`, beside what else is told of them: whoever asked can send it back.
    Raises ValueError naming what is wrong.
    """
    try:
        told: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise ValueError("the body is no JSON") from None
    if not isinstance(told, dict):
        raise ValueError("the body must be an object")
    fields = _settings(cast(dict[str, object], told))
    request = admin_pb2.UpdateEstimatesRequest()
    for name, kind in _KINDS.items():
        if (base_s := _number(fields, f"eta_{name}_s")) is not None:
            request.bases.add(kind=kind, base_duration=_duration(base_s))
    _number(fields, f"eta_{_UNSERVED}_s")
    if (smoothing := _number(fields, "ema_alpha")) is not None:
        request.smoothing = smoothing
    return request


def _settings(told: dict[str, object]) -> dict[str, object]:
    if "config" not in told:
        _refuse_unknown(told, _CONFIG)
        return told
    _refuse_unknown(told, eta_status(admin_pb2.Estimates()).keys())
    config = told["config"]
    if not isinstance(config, dict):
        raise ValueError("config must be an object")
    settings = cast(dict[str, object], config)
    _refuse_unknown(settings, _CONFIG, "config.")
    return settings


def _refuse_unknown(told: Iterable[str], known: Collection[str], prefix: str = "") -> None:
    for name in told:
        if name not in known:
            raise ValueError(f"{prefix}{name[:80]} is not a setting")


def _number(fields: dict[str, object], name: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number")
    if not 0 < value <= _MAX_S:
        raise ValueError(f"{name} must be above 0")
    return float(value)


def _duration(seconds: float) -> Duration:
    fraction, whole = math.modf(seconds)
    return Duration(seconds=int(whole), nanos=int(fraction * 1e9))


def _seconds(duration: Duration) -> float:
    return duration.ToMicroseconds() / 1e6
