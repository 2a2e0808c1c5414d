"""Evaluates a checkpoint on speakers, noises and sentences that do not occur in training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from duplane.tools.train.answers import Spoken, speak_answer
from duplane.tools.train.corpus.recording import CorpusPlan, record_corpus
from duplane.tools.train.corpus.store import Corpus
from duplane.tools.train.domain import all_answers, sums
from duplane.tools.train.evaluation.intelligibility import (
    mel_distance,
    narrow,
    original,
    spoken,
)
from duplane.tools.train.evaluation.intelligibility import understood as understood_sums
from duplane.tools.train.evaluation.recogniser import recognised
from duplane.tools.train.evaluation.running import CONTEXT_ROWS, run_sessions
from duplane.tools.train.evaluation.scores import Expected, Rate, Scores
from duplane.tools.train.listener.sessions import NoiseBank, Session, SessionBuilder, SessionRules
from duplane.tools.train.voice.phrases import held_out_answers
from duplane.worker.model.model import DuplexModel
from duplane.worker.model.types import ConversationOptions

SEED = 90_000
SLOTS = 8
LONG_UNITS = 48
DISTANCES = 12
NOISE_CLIPS = 24


@dataclass(frozen=True)
class EvaluationPlan:
    """The size of the evaluation: its first row has `sessions` sessions, other rows have fewer."""

    sessions: int = 48
    utterances: int = 600
    seed: int = SEED


@dataclass(frozen=True)
class EvaluationRow:
    """A row of the table: its name, its corpus, the rules of its sessions and their number."""

    name: str
    corpus: str
    rules: SessionRules
    sessions: int


def plan_rows(plan: EvaluationPlan) -> list[EvaluationRow]:
    """Return the rows of the table."""
    usual = SessionRules(noise_only=0.0, longest_pause_s=2.0)
    half = max(1, plan.sessions // 2)
    return [
        EvaluationRow("unheard voices", "espeak", usual, plan.sessions),
        EvaluationRow(
            "loud noise",
            "espeak",
            replace(usual, noisy=1.0, signal_to_noise=(1.0, 5.0)),
            half,
        ),
        EvaluationRow("unheard synthesiser voice", "flite", usual, half),
        EvaluationRow(
            f"sessions of {LONG_UNITS} units",
            "espeak",
            replace(usual, unit_count=LONG_UNITS),
            max(1, plan.sessions // 3),
        ),
        EvaluationRow(
            "interruptions",
            "espeak",
            replace(usual, interrupted=1.0, longest_pause_s=1.0),
            half,
        ),
        EvaluationRow("noise alone", "espeak", replace(usual, noise_only=1.0, noisy=1.0), half),
    ]


def evaluate_checkpoint(directory: Path, workspace: Path, plan: EvaluationPlan) -> dict[str, Any]:
    """Evaluate a checkpoint; return the table as plain values. `workspace` keeps the corpora."""
    model = DuplexModel.load(directory, slot_count=SLOTS, context_capacity=CONTEXT_ROWS)
    corpora = {
        name: _corpus(workspace / f"{name}-{plan.utterances}-{plan.seed}", name, plan)
        for name in ("espeak", "flite")
    }
    answers = {text: speak_answer(text) for text in all_answers()}
    noises = NoiseBank(plan.seed, NOISE_CLIPS)
    options = ConversationOptions(seed=plan.seed)
    rows: dict[str, Any] = {}
    for number, row in enumerate(plan_rows(plan)):
        _report(row.name)
        builder = SessionBuilder(corpora[row.corpus], answers, noises, row.rules)
        sessions = [builder.draw((plan.seed, number, index)) for index in range(row.sessions)]
        scores = Scores()
        outputs = run_sessions(model, [session.samples for session in sessions], options)
        for session, units in zip(sessions, outputs, strict=True):
            scores.add(expected_of(session, answers), units)
        rows[row.name] = as_values(scores)
    _report("speech")
    speech = _speech(model, options, plan)
    return {"checkpoint": directory.name, "seed": plan.seed, "rows": rows, "speech": speech}


def _speech(model: DuplexModel, options: ConversationOptions, plan: EvaluationPlan) -> Any:
    def by_model(text: str, seed: int) -> Any:
        return spoken(model, text, plan.seed + seed)

    speakers: dict[str, Callable[[str, int], Any]] = {"synthesiser": original, "model": by_model}
    rates = {name: understood_sums(model, options, speak) for name, speak in speakers.items()}
    replies = held_out_answers()
    words = {
        name: recognised(
            replies, [narrow(speak(text, number)) for number, text in enumerate(replies)]
        )
        for name, speak in speakers.items()
    }
    texts = [answer for _, answer in sums()[:: len(sums()) // DISTANCES]]
    return {
        "sums understood": {name: _rate(rate) for name, rate in rates.items()},
        "words recognised": {name: _rate(rate) for name, rate in words.items()},
        "mel distance": round(mel_distance(model, texts), 3),
    }


def _corpus(folder: Path, name: str, plan: EvaluationPlan) -> Corpus:
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


def expected_of(session: Session, answers: Mapping[str, Spoken]) -> list[Expected]:
    """Return the expected answers of a session."""
    return [
        Expected(
            one.utterance.exchange.kind,
            one.answer,
            one.first_unit,
            len(answers[one.answer].units),
            one.interrupted_unit,
        )
        for one in session.asked
        if one.first_unit >= 0
    ]


def as_values(scores: Scores) -> dict[str, Any]:
    """Return scores as plain values."""
    return {
        "onset within one unit": _rate(scores.onset),
        "whole answer exact": _rate(scores.exact),
        "interruption closed within one unit": _rate(scores.closed),
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
        "closed": "interruption closed within one unit",
        "quiet": "quiet units in noise",
    }
    lines = [f"{'':28}" + "".join(f"{name:>18}" for name in (*columns, "extra turns"))]
    for name, row in found["rows"].items():
        cells = [_cell(row[column]) for column in columns.values()]
        cells.append(f"{row['unexpected turns']} in {row['units']} units")
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
