"""Opens the scripted model for `--checkpoint scripted`."""

from __future__ import annotations

from duplane.worker.models.interface import Device
from duplane.worker.models.scripted.model import ScriptedDevice, ScriptedModel
from duplane.worker.settings import WorkerSettings


def open_device(settings: WorkerSettings) -> Device:
    """Return a device with the scripted model of the settings."""
    script = settings.script
    model = ScriptedModel(
        settings.given_slot_count,
        settings.context_token_limit,
        seed=script.scripted_seed,
        unit_s=script.scripted_unit_s,
    )
    model.stage_s["settle"] = script.scripted_settle_s
    model.stage_s["rebuild"] = script.scripted_rebuild_s
    return ScriptedDevice(model)
