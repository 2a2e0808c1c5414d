import shutil
from pathlib import Path

import orjson
import pytest
from support.paths import GOLDEN

from duplane.worker.models.minicpm_o.checkpoint import CheckpointError
from duplane.worker.models.minicpm_o.llm.tokenizer import Tokens

RECORDED = orjson.loads((GOLDEN / "units" / "tokenizer.json").read_bytes())


@pytest.fixture(params=["tokenizer.json", "vocab.json and merges.txt"])
def tokens(request: pytest.FixtureRequest, tmp_path: Path) -> Tokens:
    source = GOLDEN / "checkpoint"
    if request.param == "tokenizer.json":
        return Tokens.load(source)
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path)
    return Tokens.load(tmp_path)


def test_text_and_ids_are_those_recorded(tokens: Tokens) -> None:
    for case in RECORDED["encode"]:
        assert tokens.encode(case["text"]) == case["ids"]
        assert tokens.decode(case["ids"]) == case["skip_special"]
        assert tokens.decode(case["ids"], skip_special=False) == case["roundtrip"]


def test_special_tokens_are_found_by_name(tokens: Tokens) -> None:
    for name, number in RECORDED["special"].items():
        assert tokens.id_of(name) == number
    assert len(tokens) == RECORDED["len"]
    assert len(tokens.bad_ids) == RECORDED["n_bad"]
    assert {tokens.tts_pad, tokens.chunk_eos, *tokens.bad_ids} == set(tokens.forbidden)


def test_a_tokenizer_without_a_duplex_token_is_refused(tmp_path: Path) -> None:
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(GOLDEN / "checkpoint" / name, tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(b'{"eos_token": "<|im_end|>"}')
    with pytest.raises(CheckpointError, match="<unit>"):
        Tokens.load(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokens.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"vocab\.json"):
        Tokens.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokens.load(tmp_path)
