"""Evaluates a checkpoint on speakers, noises and digits to repeat that training lacks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, Literal

from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import FloatArray
from training.answers import speak_answer
from training.corpus.recording import CorpusPlan, record_corpus
from training.corpus.store import Corpus
from training.domain import all_answers, sums
from training.evaluation.fabric_runner import fabric_runner
from training.evaluation.inputs import Runner
from training.evaluation.intelligibility import (
    mel_distance,
    narrow,
    original,
    spoken,
)
from training.evaluation.intelligibility import understood as understood_sums
from training.evaluation.model_runner import CONTEXT_ROWS, ModelRunner
from training.evaluation.recogniser import recognised
from training.evaluation.rows import (
    NOISE_CLIPS,
    EvaluationPlan,
    SessionSource,
    draw_chats,
    session_rows,
)
from training.evaluation.scores import Rate, Scores
from training.listener.noises import NoiseBank
from training.voice.phrases import held_out_answers

Through = Literal["fabric", "model"]
SLOTS = 8
DISTANCES = 12
CHATS = "typed chats"


async def evaluate_checkpoint(
    directory: Path, workspace: Path, plan: EvaluationPlan, through: Through
) -> dict[str, Any]:
    """Evaluate a checkpoint; return the table as plain values. `workspace` keeps the corpora.

    Conversations run through a fabric or through the model in this process.
    """
    model = DuplexModel.load(directory, slot_count=SLOTS, context_capacity=CONTEXT_ROWS)
    source = SessionSource(
        {name: _corpus(workspace, name, plan) for name in ("espeak", "flite")},
        {text: speak_answer(text) for text in all_answers()},
        NoiseBank(plan.seed, NOISE_CLIPS),
    )
    async with _runner(through, directory, model) as runner:
        rows = await _rows(runner, source, plan)
        _report("speech")
        sums_understood = await _sums_understood(model, runner, plan)
    return {
        "checkpoint": directory.name,
        "seed": plan.seed,
        "through": through,
        "rows": rows,
        "speech": {"sums understood": sums_understood, **_speech(model, plan)},
    }


@contextlib.asynccontextmanager
async def _runner(through: Through, directory: Path, model: DuplexModel) -> AsyncGenerator[Runner]:
    if through == "model":
        yield ModelRunner(model)
        return
    _report("starting a fabric")
    async with fabric_runner(directory, SLOTS) as runner:
        yield runner


async def _rows(runner: Runner, source: SessionSource, plan: EvaluationPlan) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for row in session_rows(plan):
        _report(row.name)
        drawn, scores = source.draw(row, plan.seed), Scores()
        outputs = await runner.sessions([given for given, _ in drawn])
        for (_, expected), units in zip(drawn, outputs, strict=True):
            scores.add(expected, units)
        rows[row.name] = as_values(scores)
    _report(CHATS)
    chats, scores = draw_chats(plan.sessions, plan.seed), Scores()
    texts = await runner.chats([given for given, _ in chats])
    for (_, exchange), text in zip(chats, texts, strict=True):
        scores.add_answer(exchange.kind, exchange.answer, text.strip())
    return rows | {CHATS: as_values(scores)}


def _speakers(
    model: DuplexModel, plan: EvaluationPlan
) -> dict[str, Callable[[str, int], FloatArray]]:
    def by_model(text: str, seed: int) -> FloatArray:
        return spoken(model, text, plan.seed + seed)

    return {"synthesiser": original, "model": by_model}


async def _sums_understood(
    model: DuplexModel, runner: Runner, plan: EvaluationPlan
) -> dict[str, Any]:
    return {
        name: _rate(await understood_sums(runner, speak, plan.seed))
        for name, speak in _speakers(model, plan).items()
    }


def _speech(model: DuplexModel, plan: EvaluationPlan) -> dict[str, Any]:
    replies = held_out_answers()
    words = {
        name: recognised(
            replies, [narrow(speak(text, number)) for number, text in enumerate(replies)]
        )
        for name, speak in _speakers(model, plan).items()
    }
    texts = [answer for _, answer in sums()[:: len(sums()) // DISTANCES]]
    return {
        "words recognised": {name: _rate(rate) for name, rate in words.items()},
        "mel distance": round(mel_distance(model, texts), 3),
    }


def _corpus(workspace: Path, name: str, plan: EvaluationPlan) -> Corpus:
    folder = workspace / f"unheard-{name}-{plan.utterances}-{plan.seed}"
    if not folder.exists():
        _report(f"speaking questions with {name}")
        is_flite = name == "flite"
        count = plan.utterances // 4 if is_flite else plan.utterances
        record_corpus(
            folder,
            CorpusPlan(
                count,
                plan.seed + is_flite,
                flite_share=float(is_flite),
                is_held_out=True,
                coloured_share=0.3,
                reverberant_share=0.2,
            ),
        )
    return Corpus(folder)


def as_values(scores: Scores) -> dict[str, Any]:
    """Return scores as plain values."""
    return {
        "onset within one unit": _rate(scores.onset),
        "whole answer exact": _rate(scores.exact),
        "quiet units in noise": _rate(scores.quiet),
        "unexpected turns": scores.extra_turns,
        "units": scores.unit_count,
        "kinds": {kind: _rate(rate) for kind, rate in sorted(scores.kinds.items())},
        "mistakes": scores.mistakes[:40],
    }


def _rate(rate: Rate) -> dict[str, Any]:
    share = rate.share
    return {
        "share": None if share is None else round(share, 4),
        "right": rate.right,
        "count": rate.count,
    }


def _report(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def as_text(found: dict[str, Any]) -> str:
    """Return the table as text, one row per line."""
    columns = {
        "onset": "onset within one unit",
        "exact": "whole answer exact",
        "quiet": "quiet units in noise",
    }
    heading = f"through the {found['through']}"
    lines = [f"{heading:28}" + "".join(f"{name:>18}" for name in (*columns, "extra turns"))]
    for name, row in found["rows"].items():
        cells = [_cell(row[column]) for column in columns.values()]
        units = row["units"]
        cells.append(f"{row['unexpected turns']} in {units} units" if units else "-")
        lines.append(f"{name:28}" + "".join(f"{cell:>18}" for cell in cells))
    lines.append("")
    for name, rate in found["speech"]["sums understood"].items():
        lines.append(f"sums understood, spoken by the {name}: {_cell(rate)}")
    for name, rate in found["speech"]["words recognised"].items():
        lines.append(
            f"words of unpractised replies recognised, spoken by the {name}: {_cell(rate)}"
        )
    lines.append(f"mel distance to the synthesiser: {found['speech']['mel distance']}")
    return "\n".join(lines) + "\n"


def _cell(rate: dict[str, Any]) -> str:
    if not rate["count"]:
        return "-"
    return f"{100 * rate['share']:.1f} % of {rate['count']}"
