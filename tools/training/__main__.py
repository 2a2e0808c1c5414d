"""`make train` and `make evaluate`: the commands of training, which the product does not have."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import orjson
from cyclopts import App
from cyclopts.types import ExistingDirectory

from duplane.fabric.process import EXIT_INTERRUPTED, StartError
from duplane.fabric.settings import PositiveInt
from duplane.tools.command import CommandError, UsageError, run_app
from duplane.tools.up.fabric import command_errors
from duplane.worker.models.minicpm_o.checkpoint import CheckpointError
from training.evaluation.rows import EvaluationPlan
from training.evaluation.table import as_text, evaluate_checkpoint
from training.pipeline import TrainingPlan, train_checkpoint

app = App(name="training", help="Train the default model, and measure it.")


@app.command
def train(
    directory: Path,
    /,
    *,
    workspace: Path = Path(".duplane/train"),
    seed: int = 1,
    processes: PositiveInt = 2,
    steps: PositiveInt = 3600,
    utterances: PositiveInt = 36_000,
) -> None:
    """Train the default model from random weights, on speech from espeak-ng and flite.

    Both must be installed. Prints progress on stderr. A run that was stopped can be continued.

    Parameters
    ----------
    directory
        Directory to write the checkpoint to; it is created if it is missing.
    workspace
        Folder for the results of each stage. Use another folder for other settings.
    seed
        Seed of all random numbers. Results also depend on `processes`.
    processes
        Number of processes, of one thread each, that synthesise the corpus and train the listener.
    steps
        Training steps of the listener over whole sessions.
    utterances
        Questions in the corpus.
    """
    plan = TrainingPlan(seed=seed, processes=processes, steps=steps, utterances=utterances)
    try:
        train_checkpoint(directory, workspace, plan)
    except RuntimeError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None
    sys.stdout.write(f"checkpoint (seed {seed}) in {directory}\n")


@app.command
def evaluate(
    directory: ExistingDirectory,
    /,
    *,
    workspace: Path = Path(".duplane/evaluation"),
    sessions: PositiveInt = 48,
    through: Literal["fabric", "model"] = "fabric",
    json: Path | None = None,
) -> int:
    """Measure the turns, answers and speech of a default model.

    espeak-ng and flite must be installed; pocketsphinx is optional. The questions have voices,
    accents and sentences that do not occur in training. Conversations run faster than real time.

    Parameters
    ----------
    directory
        Checkpoint directory of a model that `make train` made.
    workspace
        Folder for the sound of the questions.
    sessions
        Number of sessions in the first row of the table, of 16 units each, and number of typed
        chats. No row has more.
    through
        `fabric` starts a scheduler, a worker and an edge, and talks to the edge as clients do.
        `model` calls the model in this process.
    json
        Write all numbers, and the wrong answers, to this file.
    """
    plan = EvaluationPlan(sessions=sessions)
    try:
        with command_errors():
            found = asyncio.run(evaluate_checkpoint(directory, workspace, plan, through))
    except (CheckpointError, StartError, RuntimeError) as error:
        raise CommandError(str(error)) from None
    except KeyboardInterrupt:  # the processes of the fabric have ended
        return EXIT_INTERRUPTED
    sys.stdout.write(as_text(found))
    if json is not None:
        json.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    return 0


def run(arguments: Sequence[str]) -> int:
    """Run one command; return the exit code."""
    return run_app(app, arguments)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
