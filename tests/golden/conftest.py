"""A checkpoint that can speak, and a model that runs it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.model.checkpoints import write_speaking_checkpoint

from duplane.worker.models.minicpm_o.llm import kv_cache
from duplane.worker.models.minicpm_o.model import DuplexModel

SLOTS = 4


@pytest.fixture(scope="session")
def speaking_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("speaking") / "checkpoint"
    write_speaking_checkpoint(directory)
    return directory


def _load(checkpoint: Path, context_share: float) -> DuplexModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "PAGE_ROWS", 16)
        return DuplexModel.load(
            checkpoint, slot_count=SLOTS, context_capacity=512, context_share=context_share
        )


@pytest.fixture(scope="session")
def _loaded(speaking_checkpoint: Path) -> DuplexModel:
    return _load(speaking_checkpoint, 1.0)


@pytest.fixture(scope="session")
def _lending(speaking_checkpoint: Path) -> DuplexModel:
    return _load(speaking_checkpoint, 0.3)


@pytest.fixture
def lending(_lending: DuplexModel) -> Iterator[DuplexModel]:
    """Return a model with four clean slots, which reserve 0.3 of a context each."""
    yield _lending
    for slot in range(SLOTS):
        _lending.close(slot)
    pages = _lending.llm.cache.pages
    assert pages.free == set(range(pages.scratch))


@pytest.fixture
def model(_loaded: DuplexModel) -> Iterator[DuplexModel]:
    """Return a model with four clean slots."""
    yield _loaded
    for slot in range(SLOTS):
        _loaded.close(slot)
