from pathlib import Path

import orjson
import pytest
from support.paths import GOLDEN

from duplane.tools.golden_replay import vision
from duplane.tools.golden_replay.check import Check, Verdict
from duplane.worker.models.minicpm_o.checkpoint import Checkpoint, CheckpointError


@pytest.fixture(scope="module")
def checks() -> list[Check]:
    return list(vision.checks(GOLDEN))


def test_the_vision_traces_are_reproduced(checks: list[Check], subtests: pytest.Subtests) -> None:
    for check in checks:
        with subtests.test(check.name):
            assert check.verdict is Verdict.OK, check.note
            assert check.error <= 1e-5, (
                "float32 alone should come much closer than the traces allow"
            )


def test_every_kind_of_vision_trace_was_compared(checks: list[Check]) -> None:
    names = {check.name for check in checks}
    kinds = {"tgt_sizes", "grid", "placeholder", "pixel_shapes", "pixels_head", "pixel_sums"}
    assert names >= {f"vision big_s9 {kind}" for kind in (*kinds, "embeds_r8")}
    assert names >= {"vision sq_s1 embeds", "vision batch2 embeds_r8", "vision duplex_omni frames"}


def test_a_directory_without_vision_traces_has_no_checks(tmp_path: Path) -> None:
    assert list(vision.checks(tmp_path)) == []


def test_traces_of_a_checkpoint_without_vision_are_an_error(tmp_path: Path) -> None:
    config = Checkpoint(GOLDEN / "checkpoint").config | {"init_vision": False}
    (tmp_path / "config.json").write_bytes(orjson.dumps(config))
    index = "model.safetensors.index.json"
    (tmp_path / index).symlink_to(GOLDEN / "checkpoint" / index)
    with pytest.raises(CheckpointError, match="has no vision"):
        vision.load_vision(tmp_path)
