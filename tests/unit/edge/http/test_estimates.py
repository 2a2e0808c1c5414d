"""The reference's ETA settings are converted to and from messages of the contract."""

from __future__ import annotations

import orjson
import pytest
from google.protobuf.duration_pb2 import Duration

from duplane.edge.http.estimates import eta_status, read_eta
from duplane.fabric.v1 import admin_pb2, lease_pb2

AUDIO = lease_pb2.SESSION_KIND_AUDIO_DUPLEX
CHAT = lease_pb2.SESSION_KIND_CHAT


def test_status_has_every_key_of_the_reference() -> None:
    holds = [
        admin_pb2.HoldEstimate(kind=CHAT, base_duration=Duration(seconds=15)),
        admin_pb2.HoldEstimate(
            kind=AUDIO,
            base_duration=Duration(seconds=120),
            mean_duration=Duration(seconds=7, nanos=500_000_000),
            sample_count=2,
        ),
    ]
    assert eta_status(admin_pb2.Estimates(holds=holds, smoothing=0.25)) == {
        "config": {
            "eta_chat_s": 15.0,
            "eta_half_duplex_s": 15.0,
            "eta_audio_duplex_s": 120.0,
            "eta_omni_duplex_s": 180.0,
            "ema_alpha": 0.25,
        },
        "ema_alpha": 0.25,
        "ema_chat_s": None,
        "ema_half_duplex_s": None,
        "ema_audio_duplex_s": 7.5,
        "ema_omni_duplex_s": None,
        "ema_chat_samples": 0,
        "ema_half_duplex_samples": 0,
        "ema_audio_duplex_samples": 2,
        "ema_omni_duplex_samples": 0,
    }


def test_any_subset_is_read() -> None:
    assert read_eta(b"{}") == admin_pb2.UpdateEstimatesRequest()
    told = {"eta_chat_s": 2.5, "eta_half_duplex_s": 9, "ema_alpha": None}
    base = admin_pb2.BaseHold(kind=CHAT, base_duration=Duration(seconds=2, nanos=500_000_000))
    assert read_eta(orjson.dumps(told)) == admin_pb2.UpdateEstimatesRequest(bases=[base])
    assert read_eta(b'{"ema_alpha":0.5}').smoothing == 0.5


def test_what_was_told_can_be_changed_and_sent_back() -> None:
    told = eta_status(admin_pb2.Estimates(smoothing=0.25))
    config = {"eta_chat_s": 2, "ema_alpha": 0.5}
    base = admin_pb2.BaseHold(kind=CHAT, base_duration=Duration(seconds=2))
    wanted = admin_pb2.UpdateEstimatesRequest(bases=[base], smoothing=0.5)
    assert read_eta(orjson.dumps({"config": config})) == wanted
    assert read_eta(orjson.dumps({**told, "config": config})) == wanted


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b"", "JSON"),
        (b"[]", "object"),
        (b'{"eta_chat_s":"15"}', "eta_chat_s"),
        (b'{"eta_chat_seconds":15}', "eta_chat_seconds is not a setting"),
        (b'{"config":{"eta_chats_s":15}}', "config.eta_chats_s is not a setting"),
        (b'{"config":{},"eta_chat_s":15}', "eta_chat_s is not a setting"),
        (b'{"config":[]}', "config must be an object"),
        (b'{"eta_chat_s":true}', "eta_chat_s"),
        (b'{"eta_audio_duplex_s":0}', "eta_audio_duplex_s"),
        (b'{"eta_omni_duplex_s":1e300}', "eta_omni_duplex_s"),
        (b'{"eta_half_duplex_s":{}}', "eta_half_duplex_s"),
        (b'{"ema_alpha":-1}', "ema_alpha"),
    ],
)
def test_what_cannot_be_is_named(body: bytes, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        read_eta(body)
