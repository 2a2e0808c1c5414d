"""Trains the default model from random weights; a workspace folder keeps the result of each stage.

A stage is skipped if its files exist; the listener's training continues where it stopped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, Literal

import orjson
from tokenizers import Tokenizer
from torch import Tensor

from duplane.tools.command import UsageError
from duplane.worker.models.minicpm_o.vision.encoder import Vision
from duplane.worker.models.minicpm_o.vision.siglip import VisionConfig
from duplane.worker.models.minicpm_o.vocoder.harmonic import HarmonicNetwork
from training.answers import Spoken, speak_answer
from training.corpus.clips import read_clip, trimmed
from training.corpus.mixture import MixturePlan, record_clips, record_mixture
from training.corpus.rooms import normalise
from training.corpus.store import NOISES, Corpus, write_noises
from training.dimensions import CODES, default_config
from training.domain import DIGITS, all_answers
from training.export import write_checkpoint
from training.listener.noises import record_noises
from training.listener.processes import BANK, CORPUS, train_listener
from training.listener.starting import TALKER, VISION, tensors_of, vocoder_of
from training.listener.training import ListenerPlan
from training.sources.recordings import recordings_of
from training.sources.room_files import read_room, rooms_of
from training.torch_calls import digest_of, load_tensors, save_tensors
from training.vision.stage import (
    BANK_PICTURES,
    BANK_VARIANTS,
    RULES,
    encode_bank,
    train_tower,
)
from training.vision.tower import TowerPlan
from training.vision.views import save_bank, tower_of
from training.vocabulary import Vocabulary, build_tokenizer
from training.voice.codec import all_features, encode, fit_table
from training.voice.phrases import draw_phrases, held_out_answers
from training.voice.talker import CodedAnswer, TalkerPlan, TalkerTraining
from training.voice.vocoder import build_vocoder, train_vocoder

CLIPS, PLAN = "clips", "plan.json"
TABLE, VOCODER, TALKER_FILE = "table.pt", "vocoder.pt", "talker.pt"
NOISE_COUNT = 140
"""Number of recorded noises of each kind: rooms, and voices."""
CONTINUED: dict[str, Any] = {
    "head_steps": 40,
    "sound_steps": 0,
    "rate": 1e-3,
    "matrix_rate": 1.6e-3,
    "word_share": 0.2,
    "short_share": 0.05,
    "decay_share": 0.6,
    "chats": 16,
}
"""Settings of a listener that begins with the weights of a checkpoint."""
CONTINUED_TOWER: dict[str, Any] = {"rate": 1e-3, "matrix_rate": 1.6e-3}
"""Settings of a tower that begins with the weights of a checkpoint."""
Stage = Literal["corpus", "talker", "vision", "listener", "checkpoint"]
RARE_WEIGHT, COMMON_STRIDE = 3, 5
"""The codec is fitted to every fifth answer (`COMMON_STRIDE`). Answers with words that are not
digits are rare, so the codec gets each of them three times (`RARE_WEIGHT`)."""


@dataclass(frozen=True)
class TrainingPlan:
    """The size of every stage. The corpus and the listener use `processes` processes.

    `phrases_folder` has the phrases of the stage "speak", `recordings` has words that people
    speak, `rooms` has recordings of rooms; each may be absent. The listener begins with the weights
    of the checkpoint `start`, or with random weights. The other parts of `start` stay; its tower is
    trained for `tower_steps` more steps. Raises UsageError if a process would have no sessions.
    """

    seed: int = 1
    processes: int = 2
    phrases_folder: str | None = None
    recordings: str | None = None
    rooms: str | None = None
    start: str | None = None
    utterances: int = 20_000
    copies: int = 8
    splices: int = 14_000
    vocoder_steps: int = 600
    phrases: int = 8000
    talker_steps: int = 1000
    sound_steps: int = 300
    steps: int = 1300
    tower_steps: int = 1600

    def __post_init__(self) -> None:
        if self.processes > ListenerPlan.batch:
            raise UsageError(f"processes is {self.processes}, must be at most {ListenerPlan.batch}")


@dataclass(frozen=True)
class Run:
    """A workspace and its plan, and the tokenizer and dimensions that all its stages share."""

    workspace: Path
    plan: TrainingPlan
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    config: dict[str, Any]

    @classmethod
    def begin(cls, workspace: Path, plan: TrainingPlan) -> Run:
        """Make the workspace, or open it. Raises RuntimeError if it has results of another plan."""
        workspace.mkdir(parents=True, exist_ok=True)
        _note_plan(workspace / PLAN, plan)
        tokenizer = build_tokenizer()
        return cls(workspace, plan, tokenizer, Vocabulary(tokenizer), default_config(tokenizer))


def train_checkpoint(
    directory: Path, workspace: Path, plan: TrainingPlan, until: Stage = "checkpoint"
) -> None:
    """Train all parts and write the checkpoint, or stop after a stage before it.

    Raises SynthesisError, OSError for files, and RuntimeError if a process fails, or if the
    workspace has results of another plan.
    """
    run = Run.begin(workspace, plan)
    _corpus(workspace, plan)
    print_progress(f"corpus: digest {digest_of_files(workspace / CORPUS)}")
    if until == "corpus":
        return
    start = path_of(plan.start)
    if start is None:
        answers = {text: speak_answer(text) for text in all_answers()}
        vocoder = _vocoder(workspace, answers, plan)
        talker = _talker(run, answers, vocoder.table)
    else:
        vocoder, talker = vocoder_of(start), tensors_of(start, TALKER, run.tokenizer)
    print_progress(f"talker: digest {digest_of(talker)}")
    if until == "talker":
        return
    vision = train_vision(workspace, plan)
    if until == "vision":
        return
    listener = train_listener(workspace, listener_plan(plan), plan.processes, start)
    print_progress(f"listener: digest {digest_of(listener)}")
    if until == "listener":
        return
    tensors = {**listener, **talker, **vision.state_dict()}
    write_checkpoint(directory, run.tokenizer, run.config, tensors, vocoder)


def train_vision(workspace: Path, plan: TrainingPlan) -> Vision:
    """Train the vision tower, or load it; encode pictures for the listener."""
    workspace.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    config = default_config(tokenizer)
    start = path_of(plan.start)
    known = None if start is None else tensors_of(start, VISION, tokenizer)
    if known is None or plan.tower_steps:
        tower = TowerPlan(seed=plan.seed, steps=plan.tower_steps)
        if known is not None:
            tower = replace(tower, **CONTINUED_TOWER)
        vision = train_tower(workspace, config, tower, print_progress, known)
    else:
        vision = Vision(VisionConfig.from_json(config), RULES)
        vision.load_state_dict(known)
    digest = digest_of(vision.state_dict())
    if tower_of(workspace / BANK) != digest:
        print_progress("encoding pictures")
        bank = encode_bank(vision, plan.seed, BANK_PICTURES, BANK_VARIANTS)
        save_bank(bank, workspace / BANK, digest)
    return vision


def digest_of_files(folder: Path) -> str:
    """Return the digest of the files of a folder."""
    made = sha256()
    for path in sorted(folder.iterdir()):
        made.update(path.name.encode())
        with path.open("rb") as file:
            made.update(file_digest(file, "sha256").digest())
    return made.hexdigest()


def _note_plan(path: Path, plan: TrainingPlan) -> None:
    """Write the plan of a new workspace. Raises RuntimeError if the workspace has another plan."""
    content = orjson.dumps(asdict(plan), option=orjson.OPT_INDENT_2)
    if not path.exists():
        path.write_bytes(content)
    elif path.read_bytes() != content:
        raise RuntimeError(f"{path}: has other settings; use another workspace")


def path_of(name: str | None) -> Path | None:
    """Return the path with a name, if there is one."""
    return None if name is None else Path(name)


def listener_plan(plan: TrainingPlan) -> ListenerPlan:
    """Return the plan of the listener. Weights of a checkpoint are trained at lower rates."""
    stages = ListenerPlan(seed=plan.seed, sound_steps=plan.sound_steps, steps=plan.steps)
    return stages if plan.start is None else replace(stages, **CONTINUED)


def _corpus(workspace: Path, plan: TrainingPlan) -> None:
    """Align the clips, make the corpus and the noises, unless the workspace has them."""
    clips, corpus = workspace / CLIPS, workspace / CORPUS
    if not clips.exists():
        print_progress("aligning phrases and recordings")
        record_clips(clips, path_of(plan.phrases_folder), path_of(plan.recordings))
    if not corpus.exists():
        mixture = MixturePlan(plan.seed, plan.utterances, plan.copies, plan.splices)
        record_mixture(corpus, clips, mixture, processes=plan.processes)
    if not (corpus / NOISES).exists():
        print_progress("mixing rooms and voices")
        found = {} if plan.rooms is None else rooms_of(Path(plan.rooms), "training")
        rooms = [read_room(path) for path in found.values()]
        people = path_of(plan.recordings)
        spoken = [] if people is None else recordings_of(people, "training").sentences
        sentences = [normalise(trimmed(read_clip(path))) for path in spoken]
        noises = record_noises(rooms, Corpus(corpus), plan.seed, NOISE_COUNT, sentences)
        write_noises(corpus, noises)


def print_progress(text: str) -> None:
    """Print a line of progress with the time."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {text}\n")


def _vocoder(workspace: Path, answers: Mapping[str, Spoken], plan: TrainingPlan) -> HarmonicNetwork:
    """Fit the codec and train the vocoder, or load both."""
    path = workspace / TABLE
    if path.exists():
        table = load_tensors(path)["table"]
    else:
        print_progress("fitting the codec")
        texts = sorted(answers)
        rare = [text for text in texts if not set(text.split()) <= set(DIGITS)]
        chosen = [*rare * RARE_WEIGHT, *texts[::COMMON_STRIDE]]
        features = all_features([answers[text].samples for text in chosen])
        table = fit_table(features, CODES, plan.seed)
        save_tensors({"table": table}, path)
    vocoder = build_vocoder(table, plan.seed)
    path = workspace / VOCODER
    if path.exists():
        vocoder.load_state_dict(load_tensors(path))
    else:
        print_progress("training the vocoder")
        sounds = [answers[text].samples for text in sorted(answers)]
        train_vocoder(vocoder, sounds, steps=plan.vocoder_steps, seed=plan.seed)
        save_tensors(vocoder.state_dict(), path)
    return vocoder


def _coded(answers: Mapping[str, Spoken], table: Tensor) -> dict[str, CodedAnswer]:
    """Return the words and the speech tokens of each text."""
    return {
        text: CodedAnswer(spoken.units, encode(spoken.samples, table))
        for text, spoken in answers.items()
    }


def _talker(run: Run, answers: Mapping[str, Spoken], table: Tensor) -> dict[str, Tensor]:
    """Train the talker, or load it; return its tensors with their names in the checkpoint."""
    path, plan = run.workspace / TALKER_FILE, run.plan
    if not path.exists():
        print_progress("training the talker")
        coded = _coded(answers, table)
        held_out = held_out_answers()
        texts = draw_phrases(plan.phrases, plan.seed)
        phrases = _coded({text: speak_answer(text) for text in texts}, table)
        steps = TalkerPlan(seed=plan.seed, steps=plan.talker_steps)
        training = TalkerTraining(run.config, run.vocabulary, steps)
        learned = {text: one for text, one in coded.items() if text not in held_out}
        training.run(learned, phrases)
        loss, right = training.evaluate([coded[text] for text in held_out])
        print_progress(f"talker on held-out answers: loss {loss:.3f}, right {right:.3f}")
        save_tensors(training.talker.state_dict(), path)
    return {f"tts.{name}": value for name, value in load_tensors(path).items()}
