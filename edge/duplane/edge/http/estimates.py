"""Settings of wait estimates, in the format of the reference's `/api/config/eta`. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import cast

import orjson

from duplane.fabric.durations import to_duration, to_seconds
from duplane.fabric.kinds import KINDS_BY_NAME
from duplane.fabric.v1 import admin_pb2

# Clients also expect an estimate for half duplex sessions. Each of their turns waits for a slot as
# a turn of chat does, so they have the estimate of chats, and cannot have another one.
_HALF_DUPLEX, _ITS_KIND = "half_duplex", "chat"
_CONFIG = frozenset({*(f"eta_{name}_s" for name in (*KINDS_BY_NAME, _HALF_DUPLEX)), "ema_alpha"})
_UNKNOWN_S = 180.0  # if the scheduler has no estimate of a kind
_MAX_S = 1e9  # fits into a Duration; the scheduler checks the real bounds


def eta_status(estimates: admin_pb2.Estimates) -> dict[str, object]:
    """Render a scheduler's settings of wait estimates."""
    holds = {hold.kind: hold for hold in estimates.holds}
    config: dict[str, object] = {}
    means: dict[str, object] = {}
    counts: dict[str, object] = {}
    for name in ("chat", _HALF_DUPLEX, "audio_duplex", "omni_duplex"):
        hold = holds.get(KINDS_BY_NAME[_ITS_KIND if name == _HALF_DUPLEX else name])
        config[f"eta_{name}_s"] = to_seconds(hold.base_duration) if hold else _UNKNOWN_S
        has_mean = hold is not None and hold.HasField("mean_duration")
        means[f"ema_{name}_s"] = to_seconds(hold.mean_duration) if hold and has_mean else None
        counts[f"ema_{name}_samples"] = hold.sample_count if hold else 0
    config["ema_alpha"] = estimates.smoothing
    return {"config": config, "ema_alpha": estimates.smoothing, **means, **counts}


def read_eta(body: bytes) -> admin_pb2.UpdateEstimatesRequest:
    """Parse any subset of the settings; null leaves a setting unchanged.

    The settings may be in `config`, with other fields beside it, because a client may send back the
    answer to GET. Raises ValueError that names the invalid field.
    """
    try:
        body_fields: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise ValueError("the body is not JSON") from None
    if not isinstance(body_fields, dict):
        raise ValueError("the body must be an object")
    fields = _settings(cast(dict[str, object], body_fields))
    request = admin_pb2.UpdateEstimatesRequest()
    for name, kind in KINDS_BY_NAME.items():
        if (base_s := _number(fields, f"eta_{name}_s")) is not None:
            request.bases.add(kind=kind, base_duration=to_duration(base_s))
    _number(fields, f"eta_{_HALF_DUPLEX}_s")
    if (smoothing := _number(fields, "ema_alpha")) is not None:
        request.smoothing = smoothing
    return request


def _settings(fields: dict[str, object]) -> dict[str, object]:
    if "config" not in fields:
        _refuse_unknown(fields, _CONFIG)
        return fields
    _refuse_unknown(fields, eta_status(admin_pb2.Estimates()).keys())
    config = fields["config"]
    if not isinstance(config, dict):
        raise ValueError("config must be an object")
    settings = cast(dict[str, object], config)
    _refuse_unknown(settings, _CONFIG, "config.")
    return settings


def _refuse_unknown(names: Iterable[str], known: Collection[str], prefix: str = "") -> None:
    for name in names:
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
