"""In transcripts that interrupt a turn, the worker's lines equal the answers of a real worker."""

from __future__ import annotations

import pytest
from support.protocols.transcripts import FOLDER, Transcript, read_transcript, response_of
from support.protocols.worker_lines import responses, small_model

from duplane.fabric.v1 import session_pb2
from duplane.worker.models.minicpm_o.model import DuplexModel

TRANSCRIPTS = {path.stem: path for path in sorted(FOLDER.glob("?_interrupts_a_turn.txt"))}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DuplexModel:
    return small_model(tmp_path_factory.mktemp("small") / "checkpoint")


def kind(response: session_pb2.ConverseResponse) -> tuple[object, ...]:
    """Return the parts of an answer that do not depend on the model's words."""
    delta = response.delta
    return (
        response.WhichOneof("message"),
        delta.sequence,
        delta.WhichOneof("outcome"),
        delta.end_of_turn,
        bool(delta.speech.text),
        bool(delta.speech.audio),
        delta.token_counts.input_audio_token_count,
    )


def written(transcript: Transcript) -> list[session_pb2.ConverseResponse]:
    return [response_of(step) for step in transcript.steps if step.who == "worker"]


@pytest.mark.parametrize("name", TRANSCRIPTS)
async def test_real_worker_answers_as_written(name: str, model: DuplexModel) -> None:
    transcript = read_transcript(TRANSCRIPTS[name])
    answers = [kind(answer) for answer in await responses(transcript, model)]
    assert answers == [kind(answer) for answer in written(transcript)]
    assert ("listen", True) in [answer[2:4] for answer in answers], "no turn was interrupted"
