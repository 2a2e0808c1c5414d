"""Turns sessions and chats into sequences of ids, in the order in which the worker feeds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from duplane.tools.checkpoint.text import PROSE
from duplane.worker.models.minicpm_o.chat.prompt import ANSWER_MARK, NO_THOUGHTS, SPEECH_MARK
from duplane.worker.models.minicpm_o.vision.layout import (
    ImageMarks,
    Layout,
    chat_layout,
    duplex_layout,
)
from training.dimensions import PICTURE_ROWS
from training.domain import DIGITS, Exchange
from training.listener.sessions import Decision, Session
from training.vocabulary import Vocabulary

UNIT_EMBEDDINGS = 10
AUDIO, VOICE, PICTURE = -1, -2, -3
"""Placeholders for ids in rows that hold embeddings: of the session's audio, of a voice, or of a
picture."""
IGNORED = -100
LISTEN_WEIGHT, START_WEIGHT = 1.5, 0.25
"""Weights in the loss: of decisions to listen, and of those to begin an answer.

An answer without a question is worse than one that begins late. So to the model, listening and
beginning are equally likely where a question is six times as likely as no question.
"""
CUT_SHARE = 0.15
MOST_CUT_UNITS = 6
COMMON_PROMPTS = ("You are a helpful assistant.", "Streaming Omni Conversation.")


@dataclass
class TokenRow:
    """Ids of one sequence.

    The `targets` and `weights` of a row belong to the id that follows the row.
    """

    ids: list[int] = field(default_factory=list[int])
    targets: list[int] = field(default_factory=list[int])
    weights: list[float] = field(default_factory=list[float])
    first_unit: int = 0
    pictures: list[int] = field(default_factory=list[int])
    """The numbers of the pictures, in the order of their rows."""

    def feed(self, ids: Sequence[int]) -> None:
        """Add ids that the model does not choose."""
        self.ids += ids
        self.targets += [IGNORED] * len(ids)
        self.weights += [0.0] * len(ids)

    def choose(self, token: int, weight: float = 1.0) -> None:
        """Add an id that the model chooses, after the last row."""
        self.targets[-1], self.weights[-1] = token, weight
        self.feed([token])

    def show(self, picture: int, layout: Layout, vocabulary: Vocabulary) -> None:
        """Add the rows of a picture, with the worker's marks around it."""
        for part in layout:
            self.feed(
                vocabulary.encode(part) if isinstance(part, str) else [PICTURE] * PICTURE_ROWS
            )
        self.pictures.append(picture)


def draw_prompt(chance: Random) -> str:
    """Draw the instructions of a conversation."""
    if chance.random() < 0.65:
        return chance.choice(COMMON_PROMPTS)
    lines = PROSE.splitlines()
    text = " ".join(chance.choice(lines) for _ in range(chance.randint(0, 2)))
    return text[: chance.randint(10, 120)]


def session_sequence(
    session: Session, vocabulary: Vocabulary, chance: Random, *, voice_rows: int
) -> TokenRow:
    """Return the sequence of a prompt with `voice_rows` embeddings of a voice, and of a session.

    Some sequences begin after the first units, as if a context window had dropped those units.
    """
    made = TokenRow()
    made.feed(vocabulary.encode(f"<|im_start|>system\n{draw_prompt(chance)}\n<|audio_start|>"))
    made.feed([VOICE] * voice_rows)
    made.feed(vocabulary.encode("<|audio_end|><|im_end|>"))
    if chance.random() < CUT_SHARE:
        made.first_unit = chance.randint(1, min(MOST_CUT_UNITS, len(session.decisions) - 1))
        if session.view.hides(made.first_unit):
            made.first_unit = 0
    frames = session.view.frames or [-1] * len(session.decisions)
    for frame, decision in list(zip(frames, session.decisions, strict=True))[made.first_unit :]:
        made.feed([vocabulary.unit])
        if frame >= 0:
            made.show(frame, duplex_layout(ImageMarks(), None), vocabulary)
        made.feed([AUDIO] * UNIT_EMBEDDINGS)
        _write_decision(made, decision, vocabulary)
        made.feed([vocabulary.unit_end])
    return made


def _write_decision(made: TokenRow, decision: Decision, vocabulary: Vocabulary) -> None:
    if not decision.speaks:
        made.choose(vocabulary.listen, LISTEN_WEIGHT)
        return
    made.choose(vocabulary.speak, START_WEIGHT if decision.is_start else 1.0)
    for token in vocabulary.words(decision.words, is_start=decision.is_start):
        made.choose(token)
    if decision.ends_turn:
        made.choose(vocabulary.turn_eos)
    made.choose(vocabulary.chunk_eos)


def typed(question: str, chance: Random) -> str:
    """Return a question as people may type it, with or without capitals, digits and punctuation."""
    words = question.split()
    if chance.random() < 0.5:
        words = [str(DIGITS.index(word)) if word in DIGITS else word for word in words]
    text = " ".join(words)
    if chance.random() < 0.6:
        text = text[0].upper() + text[1:]
    if chance.random() < 0.3:
        text = text.replace("plus", "+")
    return text + chance.choice(("", "", "?", ".", "!"))


def chat_sequence(
    exchanges: Sequence[Exchange],
    vocabulary: Vocabulary,
    chance: Random,
    pictures: Sequence[int] = (),
) -> TokenRow:
    """Return a chat as the worker's sequence of ids; the model chooses the last answer.

    `pictures` has for each exchange the number of the picture that its message shows, or -1.
    """
    made = TokenRow()
    marks = ImageMarks()
    joint = "" if chance.random() < 0.2 else "\n"
    is_numbered, is_picture_first = chance.random() < 0.85, chance.random() < 0.6
    pending = ""
    if chance.random() < 0.7:
        pending += f"<|im_start|>system\n{draw_prompt(chance)}<|im_end|>\n"
    for number, exchange in enumerate(exchanges):
        pending += "<|im_start|>user\n"
        question = typed(exchange.question, chance)
        picture = pictures[number] if pictures else -1
        if picture < 0:
            pending += question
        else:
            pending += "" if is_picture_first else question + joint
            made.feed(vocabulary.encode(pending))
            image_id = len(made.pictures) if is_numbered else None
            made.show(picture, chat_layout(marks, None, image_id), vocabulary)
            pending = joint + question if is_picture_first else ""
        pending += "<|im_end|>\n"
        if number < len(exchanges) - 1:
            pending += f"<|im_start|>assistant\n{exchange.answer}<|im_end|>\n"
    is_spoken = chance.random() < 0.5
    made.feed(vocabulary.encode(pending + ANSWER_MARK + NO_THOUGHTS + SPEECH_MARK * is_spoken))
    for token in vocabulary.words(exchanges[-1].answer.split(), is_start=True):
        made.choose(token)
    made.choose(vocabulary.tts_eos)
    return made


@dataclass(frozen=True)
class Batch:
    """Sequences padded to one length: ids, targets and weights, [sequences, length].

    `audio`, `voice` and `picture` mark the rows that embeddings replace.
    """

    ids: Tensor
    targets: Tensor
    weights: Tensor
    audio: Tensor
    voice: Tensor
    picture: Tensor

    @classmethod
    def of(cls, sequences: Sequence[TokenRow]) -> Batch:
        """Pad sequences at their ends."""
        length = max(len(one.ids) for one in sequences)

        def padded(rows: Sequence[Sequence[float]], fill: float) -> Tensor:
            return torch.tensor([[*row, *[fill] * (length - len(row))] for row in rows])

        ids = padded([one.ids for one in sequences], 0).long()
        return cls(
            ids=ids.clamp(min=0),
            targets=padded([one.targets for one in sequences], IGNORED).long(),
            weights=padded([one.weights for one in sequences], 0.0).float(),
            audio=ids == AUDIO,
            voice=ids == VOICE,
            picture=ids == PICTURE,
        )
