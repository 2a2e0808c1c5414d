"""Random checkpoints have the released model's shapes; inspection reports faults and memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from support.model.fake_cuda import DEVICE, Way, elsewhere
from support.model.voice_files import write_voice_networks
from support.paths import GOLDEN
from support.tools.command import run_command

from duplane.tools.checkpoint.dimensions import VOICE_TOKENS
from duplane.tools.checkpoint.options import byte_count
from duplane.tools.checkpoint.parts import expected_shapes
from duplane.tools.checkpoint.random_weights import draw_tensor, plan_shards, write_random
from duplane.worker.models.minicpm_o.checkpoint import Checkpoint
from duplane.worker.models.minicpm_o.memory import (
    StageMemory,
    VocoderPlan,
    slots_that_fit,
    stages,
    vocoder_modules,
)
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import ConversationOptions, Unit, UnitOutput

pytestmark = pytest.mark.slow

LIKE = "minicpm-o-4.5"
SCALE = 0.02
GOLDEN = GOLDEN / "checkpoint"

# Millions of parameters of the released model, by part.
RELEASED = {
    "LLM layers": "6,946.08",
    "LLM embeddings": "621.56",
    "LLM head": "621.56",
    "vision encoder": "402.55",
    "resampler": "88.91",
    "audio encoder": "307.22",
    "audio projector": "20.98",
    "talker": "347.70",
    "flow": "155.80",
    "HiFT": "20.81",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random") / "checkpoint"
    write_random(folder, LIKE, factor=SCALE, seed=3, shard_bytes=1_000_000)
    return folder


def test_full_size_has_the_parameters_of_the_released_model(tmp_path: Path) -> None:
    code, output = run_command(
        "checkpoint", "random", str(tmp_path / "none"), "--like", LIKE, "--dry"
    )
    assert code == 0
    counted = output.partition("memory in")[0]
    rows = [line.rsplit(maxsplit=2) for line in counted.splitlines() if line.count("  ")]
    said = {row[0].strip(): row[2] for row in rows if len(row) == 3}
    assert {part: said[part] for part in RELEASED} == RELEASED
    assert not (tmp_path / "none").exists()


def test_a_random_checkpoint_is_sharded_and_converses(directory: Path) -> None:
    assert len(list(directory.glob("model-*.safetensors"))) > 2
    model = DuplexModel.load(directory, slot_count=1, context_capacity=256)
    model.open(0, ConversationOptions(seed=1, force_listen_count=0))
    (output,) = model.step([Unit(0, np.full(16000, 0.1, np.float32))])
    assert isinstance(output, UnitOutput)
    assert len(output.audio) >= 24000


def test_the_same_seed_gives_the_same_weights_whatever_the_shards(
    directory: Path, tmp_path: Path
) -> None:
    write_random(tmp_path, LIKE, factor=SCALE, seed=3)
    first, again = (
        {
            name: tensor
            for path in Checkpoint(folder).files
            for name, tensor in safetensors.torch.load_file(path).items()
        }
        for folder in (directory, tmp_path)
    )
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = draw_tensor("llm.lm_head.weight", (8, 8), torch.float32, seed=4)
    assert not torch.equal(other, draw_tensor("llm.lm_head.weight", (8, 8), torch.float32, seed=3))


def test_weights_are_drawn_on_the_device_and_returned_on_the_cpu() -> None:
    with elsewhere() as border:
        drawn = draw_tensor("a.weight", (8, 8), torch.bfloat16, seed=3, device=torch.device(DEVICE))
    assert [crossing.way for crossing in border.crossings] == [Way.DOWN]
    assert (drawn.device.type, drawn.dtype) == ("cpu", torch.bfloat16)
    assert drawn.float().std() > 0


def test_an_absent_device_is_refused(tmp_path: Path) -> None:
    code, output = run_command(
        "checkpoint", "random", str(tmp_path / "none"), "--device", "cuda:99"
    )
    assert code == 2
    assert "device cuda:99 is not there" in output


def test_shards_hold_as_much_as_allowed_and_a_large_tensor_alone() -> None:
    tensors = [("a", (10,)), ("b", (10,)), ("c", (100,)), ("d", (10,))]
    planned = [[name for name, _ in shard] for shard in plan_shards(tensors, 40)]
    assert planned == [["a", "b"], ["c"], ["d"]]


def test_a_scale_or_a_likeness_that_cannot_be_is_refused(tmp_path: Path) -> None:
    for flags in (["--scale", "0"], ["--like", "gpt"], ["--dry", "--device-memory", "big"]):
        code, output = run_command("checkpoint", "random", str(tmp_path / "x"), *flags)
        assert code == 2
        assert output.startswith("duplane: ")
        assert flags[-2].removeprefix("--") in output
    assert not (tmp_path / "x").exists()


def test_inspection_finds_a_whole_checkpoint_whole(directory: Path) -> None:
    code, output = run_command("checkpoint", "inspect", str(directory), "--device-memory", "24GB")
    assert code == 0
    assert "missing: none" in output
    assert "unused: 5" in output
    assert "a device of 24 GB has room for" in output
    assert run_command("checkpoint", "inspect", str(GOLDEN))[0] == 0


def test_inspection_lists_what_is_missing_and_misshapen(directory: Path, tmp_path: Path) -> None:
    tensors = {
        name: tensor
        for path in Checkpoint(directory).files
        for name, tensor in safetensors.torch.load_file(path).items()
    }
    del tensors["llm.model.norm.weight"]
    tensors["apm.conv1.bias"] = torch.zeros(3)
    tensors["somewhere.else"] = torch.zeros(2)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    code, output = run_command("checkpoint", "inspect", str(tmp_path))
    assert code == 1
    assert "missing: 1\n  llm.model.norm.weight\n" in output
    assert "misshapen: 1\n  apm.conv1.bias [3], expected" in output
    assert "somewhere.else" in output
    assert run_command("checkpoint", "inspect", str(tmp_path / "nothing"))[0] == 2


def test_what_inspection_says_of_memory_is_what_the_model_takes(directory: Path) -> None:
    slots = 5
    config = Checkpoint(directory).config
    plan = VocoderPlan(*vocoder_modules(directory / "assets" / "token2wav"), 2 * VOICE_TOKENS)
    said = stages(config, capacity=512, dtype=torch.float32, vocoder=plan)
    model = DuplexModel.load(directory, slot_count=slots, context_capacity=512)
    estimate = sum(stage.fixed_bytes + slots * stage.slot_bytes for stage in said)
    assert estimate == pytest.approx(model.memory_bytes, rel=0.03)


def test_inspection_counts_the_room_for_voices_made_of_clips(
    directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(directory, tmp_path / "both")
    write_voice_networks(tmp_path / "both" / "assets" / "token2wav")
    model = DuplexModel.load(tmp_path / "both", slot_count=4, context_capacity=512)
    question = ("--context", "512", "--dtype", "float32")
    _, with_networks = run_command("checkpoint", "inspect", str(tmp_path / "both"), *question)
    _, without = run_command("checkpoint", "inspect", str(directory), *question)
    said = [float(_all_line(output)[-1].replace(",", "")) for output in (with_networks, without)]
    fixed = float(_all_line(with_networks)[-2].replace(",", ""))
    assert said[0] > said[1]
    assert (fixed + 4 * said[0]) * 1e6 == pytest.approx(model.memory_bytes, rel=0.05)


def _all_line(output: str) -> list[str]:
    """Return the sums in the last line of the memory table: fixed, and per slot."""
    return [line for line in output.splitlines() if line.startswith("all")][-1].split()


def test_every_expected_tensor_is_in_the_golden_checkpoint_with_its_shape() -> None:
    checkpoint = Checkpoint(GOLDEN)
    expected = expected_shapes(checkpoint.config)
    assert {name: checkpoint.shapes()[name] for name in expected} == expected


def test_slots_share_what_the_weights_and_a_tenth_leave() -> None:
    held = [StageMemory("a", 100, 30), StageMemory("b", 200, 20)]
    assert slots_that_fit(held, 1000) == 12
    assert slots_that_fit(held, 100) == 0
    assert slots_that_fit(held, 1000, graph_bytes=120) == 9


@pytest.mark.parametrize(
    ("text", "size"), [("141GB", 141_000_000_000), ("80 GiB", 80 * 2**30), ("1.5TB", 1.5e12)]
)
def test_sizes_are_read_with_their_units(text: str, size: float) -> None:
    assert byte_count(text) == size


def test_device_without_room_for_a_slot_is_told_why_and_what_would_fit(tmp_path: Path) -> None:
    arguments = ("checkpoint", "random", str(tmp_path / "none"), "--like", LIKE, "--scale", "0.1")
    size = ("--dry", "--context", "8192", "--dtype", "float32", "--device-memory")
    code, output = run_command(*arguments, *size, "1.35GB")
    assert code == 0
    assert "has room for 0 slots" in output
    assert "weights and tables take" in output
    assert "one slot fits a device of" in output
    assert "slots fit this device" in output
    _, output = run_command(*arguments, *size, "1MB")
    assert "it needs a smaller model" in output


def test_checkpoint_without_vocoder_is_told(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "silent")
    shutil.rmtree(tmp_path / "silent" / "assets")
    _, output = run_command("checkpoint", "inspect", str(tmp_path / "silent"))
    assert "warning: the vocoder is absent" in output
    assert "vocoder is absent" not in run_command("checkpoint", "inspect", str(directory))[1]


def test_checkpoint_without_vocoder_warns_when_it_is_loaded(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(directory, tmp_path / "silent")
    shutil.rmtree(tmp_path / "silent" / "assets")
    DuplexModel.load(tmp_path / "silent", slot_count=1, context_capacity=512)
    assert "text without speech" in caplog.text
    caplog.clear()
    DuplexModel.load(directory, slot_count=1, context_capacity=512)
    assert not caplog.text


def test_another_kind_of_model_is_refused_by_name(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    ours, other = (f'"model_type": "{name}"'.encode() for name in ("minicpmo", "llama"))
    path.write_bytes(path.read_bytes().replace(ours, other))
    code, output = run_command("checkpoint", "inspect", str(tmp_path / "other"))
    assert code == 2
    assert "'llama'" in output
    assert "'minicpmo'" in output
