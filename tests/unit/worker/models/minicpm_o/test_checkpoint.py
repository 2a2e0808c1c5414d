import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from duplane.worker.models.minicpm_o.audio.whisper import AudioConfig
from duplane.worker.models.minicpm_o.checkpoint import (
    Checkpoint,
    CheckpointError,
    field,
    read_config,
    section,
)
from duplane.worker.models.minicpm_o.llm.decoder import DecoderConfig
from duplane.worker.models.minicpm_o.tts.talker import TalkerConfig
from duplane.worker.models.minicpm_o.vision.siglip import VisionConfig

pytestmark = pytest.mark.slow


def write(directory: Path, shards: dict[str, dict[str, torch.Tensor]]) -> Path:
    """Write a sharded checkpoint with an empty configuration."""
    (directory / "config.json").write_bytes(b"{}")
    index: dict[str, str] = {}
    for name, tensors in shards.items():
        save_file(tensors, directory / name)
        index |= dict.fromkeys(tensors, name)
    path = directory / "model.safetensors.index.json"
    path.write_bytes(orjson.dumps({"weight_map": index}))
    return directory


def test_a_module_is_filled_from_its_prefix_in_its_own_dtype(tmp_path: Path) -> None:
    weight, bias = torch.randn(2, 3), torch.randn(2)
    write(
        tmp_path,
        {
            "one.safetensors": {"a.weight": weight.bfloat16(), "a.stray": torch.zeros(1)},
            "two.safetensors": {"a.bias": bias, "b.weight": torch.zeros(1)},
        },
    )
    module = nn.Linear(3, 2)
    assert Checkpoint(tmp_path).load_into(module, "a.") == ("a.stray",)
    assert module.weight.dtype == torch.float32
    assert torch.equal(module.weight, weight.bfloat16().float())
    assert torch.equal(module.bias, bias)


def test_a_checkpoint_of_one_file_needs_no_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    save_file({"bias": torch.ones(2), "weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    module = nn.Linear(3, 2)
    assert Checkpoint(tmp_path).load_into(module, "") == ()
    assert module.bias.tolist() == [1, 1]


def test_one_error_lists_everything_missing_or_misshapen(tmp_path: Path) -> None:
    write(tmp_path, {"one.safetensors": {"a.0.weight": torch.zeros(3, 3)}})
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    with pytest.raises(CheckpointError) as error:
        Checkpoint(tmp_path).load_into(module, "a.")
    message = str(error.value)
    assert "a.0.weight has shape [3, 3], expected [2, 3]" in message
    for name in ("a.0.bias", "a.1.weight", "a.1.bias"):
        assert f"{name} is missing" in message


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "does not exist"), (b"{", "cannot be read"), (b"[]", "not a JSON object")],
)
def test_a_bad_configuration_names_the_file(
    tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{complaint}"):
        Checkpoint(tmp_path)


def configured(directory: Path, **fields: object) -> dict[str, Any]:
    (directory / "config.json").write_bytes(orjson.dumps(fields))
    return read_config(directory)


@pytest.mark.parametrize("version", ["4.5", 4.5, "default", None])
def test_versions_that_the_code_runs_are_accepted(tmp_path: Path, version: object) -> None:
    assert configured(tmp_path, version=version)["hidden_size"] == 4096


@pytest.mark.parametrize("version", ["2.6", 2.6, "5"])
def test_another_version_is_refused_by_name(tmp_path: Path, version: object) -> None:
    with pytest.raises(CheckpointError, match=rf"version '{version}' of 'minicpmo'; .*'4\.5'"):
        configured(tmp_path, version=version)


def test_absent_fields_have_the_defaults_of_the_reference(tmp_path: Path) -> None:
    config = configured(
        tmp_path, hidden_size=64, head_dim=None, audio_config={"d_model": 8, "encoder_layers": None}
    )
    dims = DecoderConfig.from_json(config, has_head_norm=True)
    assert (dims.hidden_size, dims.head_dim, dims.key_heads, dims.layers) == (64, 128, 32, 32)
    heard = AudioConfig.from_json(config)
    assert (heard.width, heard.layer_count, heard.mel_bins, heard.pool) == (8, 4, 80, 5)
    talker = TalkerConfig.from_json(config, rows=9000)
    assert (talker.llm_hidden_size, talker.speech_rows, talker.capacity) == (2560, 4097, 4096)
    seen = VisionConfig.from_json(config)
    assert (seen.width, seen.layer_count, seen.patch_size) == (1152, 26, 14)
    with pytest.raises(CheckpointError, match="audio_config"):
        AudioConfig.from_json(configured(tmp_path, audio_config=3))


def test_a_directory_without_tensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="neither"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("content", [None, b"not safetensors"])
def test_a_shard_that_is_gone_or_broken_is_named(tmp_path: Path, content: bytes | None) -> None:
    write(tmp_path, {"one.safetensors": {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}})
    shard = tmp_path / "one.safetensors"
    shard.unlink() if content is None else shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"one\.safetensors"):
        Checkpoint(tmp_path).load_into(nn.Linear(3, 2), "")


def test_an_index_cannot_point_out_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    index = {"weight_map": {"weight": "../other.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_bytes(orjson.dumps(index))
    with pytest.raises(CheckpointError, match="elsewhere"):
        Checkpoint(tmp_path)


def test_fields_are_read_with_their_type() -> None:
    config = {"layers": 3, "eps": 1, "name": "x", "none": None, "flag": True, "inner": {"a": 1}}
    assert field(config, "layers", int) == 3
    assert field(config, "eps", float) == 1.0
    assert field(config, "none", int, 7) == 7
    assert field(config, "absent", str, "y") == "y"
    assert section(config, "inner") == {"a": 1}
    for name, kind in (("absent", int), ("name", int), ("flag", int), ("layers", bool)):
        with pytest.raises(CheckpointError, match=name):
            field(config, name, kind)
    with pytest.raises(CheckpointError, match="layers"):
        section(config, "layers")


def test_one_error_lists_the_faults_of_all_modules(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "one.safetensors": {"a.weight": torch.zeros(2, 3), "c.bias": torch.zeros(1)},
            "two.safetensors": {"b.weight": torch.zeros(5), "b.bias": torch.zeros(1)},
        },
    )
    modules = {"a.": nn.Linear(3, 2), "b.": nn.Linear(2, 1)}
    with pytest.raises(CheckpointError) as error:
        Checkpoint(tmp_path).load_all(modules)
    assert "a.bias is missing" in str(error.value)
    assert "b.weight has shape [5], expected [1, 2]" in str(error.value)


def test_what_no_module_has_a_place_for_is_named(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.zeros(2, 3), "a.bias": torch.zeros(2)}
    write(tmp_path, {"one.safetensors": {**tensors, "a.more": torch.zeros(1), "z": torch.ones(1)}})
    assert Checkpoint(tmp_path).load_all({"a.": nn.Linear(3, 2)}) == ("a.more", "z")


def test_shapes_are_read_from_every_shard(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"one.safetensors": {"a": torch.zeros(2, 3)}, "two.safetensors": {"b": torch.zeros(())}},
    )
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.shapes() == {"a": (2, 3), "b": ()}
    assert [path.name for path in checkpoint.files] == ["one.safetensors", "two.safetensors"]


_LOAD = """
import resource, sys
from pathlib import Path
import torch
from torch import nn
from duplane.worker.models.minicpm_o.checkpoint import Checkpoint

dtype = getattr(torch, sys.argv[2])
with torch.device("meta"):
    layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(96)))
Checkpoint(Path(sys.argv[1]))
torch.zeros(8).to(dtype).sum()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = layers.to(dtype).to_empty(device="cpu")
Checkpoint(Path(sys.argv[1])).load_into(model, "")
assert all(parameter[0, 0] == 1 for parameter in model.parameters())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_loading_takes_the_memory_of_the_model_and_one_shard(tmp_path: Path, dtype: str) -> None:
    shards = {
        f"{shard:02}.safetensors": {
            f"{layer}.weight": torch.ones(1024, 1024, dtype=torch.bfloat16)
            for layer in range(8 * shard, 8 * shard + 8)
        }
        for shard in range(12)
    }
    write(tmp_path, shards)
    run = subprocess.run(
        [sys.executable, "-c", _LOAD, str(tmp_path), dtype],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    model = 96 * 1024 * 1024 * getattr(torch, dtype).itemsize
    shard = 8 * 1024 * 1024 * 2
    assert int(run.stdout) * 1024 < model + 2 * shard


def test_the_digest_is_that_of_the_files_not_of_their_place(tmp_path: Path) -> None:
    tensors = {"one.safetensors": {"a.weight": torch.zeros(1 << 22)}}
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    write(first, tensors)
    shutil.copytree(first, second)
    (second / "README.md").write_text("a note")
    digest = Checkpoint(first).digest()
    assert Checkpoint(second).digest() == digest
    tensors["one.safetensors"]["a.weight"] += 1e-3
    write(second, tensors)
    assert Checkpoint(second).digest() != digest
    write(first, {"one.safetensors": {"a.weight": torch.zeros(1)}})
    assert Checkpoint(first).digest() != digest
