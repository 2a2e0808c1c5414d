from pathlib import Path

import orjson
import pytest
from support.paths import GOLDEN
from tokenizers import Tokenizer

from duplane.tools.golden_replay import chat
from duplane.tools.golden_replay.check import Check, Verdict
from duplane.worker.models.minicpm_o.chat.prompt import ANSWER_MARK, NO_THOUGHTS, SPEECH_MARK


@pytest.fixture(scope="module")
def checks() -> list[Check]:
    return list(chat.checks(GOLDEN))


def test_the_chats_are_reproduced(checks: list[Check], subtests: pytest.Subtests) -> None:
    for check in checks:
        with subtests.test(check.name):
            assert check.verdict is Verdict.OK, check.note
            assert check.error <= 1e-5, "float32 alone should come closer than the traces allow"


def test_every_chat_was_played(checks: list[Check]) -> None:
    sessions = {path.stem for path in (GOLDEN / "sessions").glob("chat_*.json")}
    assert {check.name.split()[0] for check in checks} == {*sessions, "half_duplex"}


@pytest.mark.parametrize("path", sorted((GOLDEN / "sessions").glob("chat_*.json")))
def test_context_of_the_reference_has_the_mark_before_the_answer(path: Path) -> None:
    """So the length of the cache exceeds the rows of the prompt and the ids of the answer."""
    tokenizer = Tokenizer.from_file(str(GOLDEN / "checkpoint" / "tokenizer.json"))
    trace = orjson.loads(path.read_bytes())
    ids = [token for chunk in trace["llm_chunks"] for token in chunk["token_ids"]]
    mark = tokenizer.encode(ANSWER_MARK + NO_THOUGHTS + SPEECH_MARK, add_special_tokens=False).ids
    assert trace["kv_after_generate"] == trace["kv_after_prefill"] + len(mark) + len(ids)
