"""The plan of a device's memory: it equals the real tensors, and decides the number of slots."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import orjson
import pytest
import torch
from support.model.checkpoints import write_speaking_checkpoint
from support.model.fake_cuda import DEVICE, elsewhere

from duplane.tools.checkpoint.dimensions import Dimensions, dimensions
from duplane.tools.checkpoint.flow_yaml import flow_yaml
from duplane.tools.checkpoint.tokenizer_files import train_tokenizer
from duplane.tools.doctor.device import of_memory
from duplane.tools.doctor.findings import Level
from duplane.worker.checkpoints import DEFAULT_CHECKPOINT
from duplane.worker.models.families import open_device
from duplane.worker.models.interface import LoadError
from duplane.worker.models.minicpm_o import loader, memory
from duplane.worker.models.minicpm_o.dtype import torch_dtype
from duplane.worker.models.minicpm_o.memory import choose_slot_count, plan_vocoder, stages
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.preparer_parts import VOCODER_FOLDER
from duplane.worker.models.minicpm_o.vocoder.voice import SPEAKER_FILE, TOKENIZER_FILE
from duplane.worker.settings import WorkerSettings

pytestmark = pytest.mark.slow

GB = 10**9
CONTEXT = 512


def storages() -> dict[int, torch.UntypedStorage]:
    """Return the storages of all tensors of this process by address. The result keeps them."""
    gc.collect()
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    held = [each.untyped_storage() for each in found if each.device.type == "cpu"]
    return {storage.data_ptr(): storage for storage in held}


@pytest.fixture(scope="module")
def speaking_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("speaking") / "checkpoint"
    write_speaking_checkpoint(made)
    return made


@pytest.fixture(params=["harmonic", "flow"])
def directory(request: pytest.FixtureRequest, speaking_checkpoint: Path) -> Path:
    return DEFAULT_CHECKPOINT if request.param == "harmonic" else speaking_checkpoint


@pytest.mark.parametrize(("dtype", "share"), [("float32", 1.0), ("bfloat16", 0.6)])
def test_the_plan_equals_the_sum_of_the_real_tensors(
    directory: Path, dtype: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A plan is for GPUs, which have no packed weights.
    monkeypatch.setattr(loader, "pack_products", lambda *_: None)
    slots, turn_rows = 6, 300
    before = storages()
    model = DuplexModel.load(
        directory,
        slot_count=slots,
        context_capacity=CONTEXT,
        dtype=dtype,
        turn_rows=turn_rows,
        context_share=share,
    )
    real = sum(each.nbytes() for at, each in storages().items() if at not in before)
    held = stages(
        memory.read_config(directory),
        capacity=CONTEXT,
        dtype=torch_dtype(dtype),
        vocoder=plan_vocoder(directory / VOCODER_FOLDER),
        turn_rows=turn_rows,
        share=share,
    )
    planned = sum(stage.fixed_bytes + slots * stage.slot_bytes for stage in held)
    assert planned == pytest.approx(real, rel=0.01)
    assert model.memory_bytes == pytest.approx(real, rel=0.01)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the configuration of the released model at full size, without weights."""
    made: Dimensions = dimensions("minicpm-o-4.5", 1.0, train_tokenizer())
    folder = tmp_path_factory.mktemp("released") / "checkpoint"
    vocoder = folder / VOCODER_FOLDER
    vocoder.mkdir(parents=True)
    (folder / "config.json").write_bytes(orjson.dumps(made.config))
    (vocoder / "flow.yaml").write_text(flow_yaml(made.flow), encoding="utf-8")
    (vocoder / "hift_dims.json").write_bytes(orjson.dumps(made.hift))
    for name in (TOKENIZER_FILE, SPEAKER_FILE):
        (vocoder / name).touch()
    return folder


def settings(directory: Path, slots: object, **values: object) -> WorkerSettings:
    chosen = {"checkpoint": directory, "slot_count": slots, "device": DEVICE, **values}
    return WorkerSettings(**chosen)  # pyright: ignore[reportArgumentType] - any setting


# The fewest and the most slots of 8k tokens that a card of this size may get.
@pytest.mark.parametrize(("size", "fewest", "most"), [(80, 30, 36), (141, 64, 76)])
def test_slots_of_8k_fit_the_cards_of_today(
    released: Path, size: int, fewest: int, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with elsewhere(memory_bytes=size * GB):
        count = choose_slot_count(settings(released, "auto"), "bfloat16")
        assert fewest <= count <= most
        assert f"{count} slots, of {count} that fit: cuda:0 has {size}.0 GB free" in caplog.text
        assert choose_slot_count(settings(released, 2), "bfloat16") == 2
        for context, expected in ((4096, count + 5), (2048, count + 10)):
            shorter = settings(released, "auto", context_token_limit=context)
            assert choose_slot_count(shorter, "bfloat16") > expected
        whole = settings(released, "auto", context_share=1.0)
        assert choose_slot_count(whole, "bfloat16") < fewest
        wanted = count + 1
        with pytest.raises(LoadError, match=rf"slots is {wanted}, .* \(--slots {count}\): cuda:0"):
            choose_slot_count(settings(released, wanted), "bfloat16")


@pytest.mark.parametrize("slots", ["auto", 1])
def test_a_card_without_room_for_a_slot_is_refused(released: Path, slots: object) -> None:
    with (
        elsewhere(memory_bytes=24 * GB),
        pytest.raises(LoadError, match=f"slots is {slots}, but not even one fits: cuda:0 has 24.0"),
    ):
        choose_slot_count(settings(released, slots), "bfloat16")


def test_a_worker_takes_as_many_slots_as_fit(speaking_checkpoint: Path) -> None:
    chosen = settings(
        speaking_checkpoint,
        "auto",
        context_token_limit=CONTEXT,
        cuda_graphs=False,
        dtype="float32",
    )
    held = stages(
        memory.read_config(speaking_checkpoint),
        capacity=CONTEXT,
        dtype=torch.float32,
        vocoder=plan_vocoder(speaking_checkpoint / VOCODER_FOLDER),
        share=chosen.given_context_share,
    )
    fixed, slot = sum(s.fixed_bytes for s in held), sum(s.slot_bytes for s in held)
    with elsewhere(memory_bytes=round((fixed + 3.5 * slot) / 0.9)):
        _, model = open_device(chosen).load()
        finding = of_memory(chosen)
    assert model.constants.slot_count == 3
    assert (finding.level, finding.flag) == (Level.OK, "--slots")
    assert finding.message.startswith("3 slots fit")
    with elsewhere(memory_bytes=fixed):
        refused = of_memory(chosen)
    assert (refused.level, refused.flag) == (Level.ERROR, "--slots")
