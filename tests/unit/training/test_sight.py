"""Training shows pictures as the worker lays them out, and asks about the picture that is seen."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from support.training import fake_answers, fake_corpus, small_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn

from duplane.worker.models.chat import (
    ChatImage,
    ChatMessage,
    ChatOptions,
    ChatRequest,
    ChatRole,
)
from duplane.worker.models.minicpm_o.chat.prompt import answer_mark
from duplane.worker.models.minicpm_o.duplex.inputs import count_rows, prepare_unit
from duplane.worker.models.minicpm_o.preparer import Preparer
from duplane.worker.models.minicpm_o.preparer_parts import PreparerParts, load_preparer_parts
from duplane.worker.models.types import Unit
from training.dimensions import PICTURE_ROWS, default_config
from training.domain import Exchange
from training.export import write_settings
from training.listener.network import ListenerNetworks, run_decoder
from training.listener.seeing import SeenLayer
from training.listener.sequences import (
    AUDIO,
    PICTURE,
    Batch,
    TokenRow,
    chat_sequence,
    session_sequence,
)
from training.listener.sessions import NoiseBank, SessionBuilder, SessionRules
from training.listener.starting import moved_table
from training.listener.steps import draw_chat, embed
from training.vision.pictures import draw_picture
from training.vision.questions import BLIND, QUESTIONS, answer_about
from training.vision.scenes import COLOURS, SHAPES, Scene
from training.vision.tower import HEADS, labels
from training.vision.views import PictureBank, load_bank, save_bank, tower_of
from training.vocabulary import Vocabulary

SCENES = [Scene(shape, colour, 1) for shape in SHAPES for colour in COLOURS]
QUESTION = "what do you see"
CHATS = 1200


@pytest.fixture(scope="module")
def parts(vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory) -> PreparerParts:
    folder = tmp_path_factory.mktemp("settings")
    config = default_config(vocabulary.tokenizer) | {"init_tts": False}
    write_settings(folder, vocabulary.tokenizer, config)
    return load_preparer_parts(folder)


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> SessionBuilder:
    corpus = fake_corpus(tmp_path_factory.mktemp("corpus"))
    rules = SessionRules(pictured=1.0, interrupted=0.0)
    return SessionBuilder(corpus, fake_answers(), NoiseBank(1, count=2), rules, SCENES)


@pytest.mark.parametrize("is_picture_first", [True, False])
def test_chat_with_a_picture_has_the_ids_of_the_worker(
    parts: PreparerParts, vocabulary: Vocabulary, *, is_picture_first: bool
) -> None:
    """Training draws many layouts: with numbered pictures, the picture first, and so on."""
    image = ChatImage(draw_picture(Random(1)).jpeg())
    content = (image, QUESTION) if is_picture_first else (QUESTION, image)
    options = ChatOptions(generate_audio=False, use_image_id=True)
    prepared = Preparer(parts, 1024).chat(
        ChatRequest((ChatMessage(ChatRole.USER, content),), options)
    )
    unknown = parts.prompts.tokens.unknown
    served = [*prepared.prompt.ids, *answer_mark(parts.prompts.tokens, options)]
    assert served.count(unknown) == PICTURE_ROWS
    exchange = Exchange("see", QUESTION, "hello")
    answer = vocabulary.words(["hello"], is_start=True)
    trained = (
        chat_sequence([exchange], vocabulary, Random(seed), [0]).ids for seed in range(CHATS)
    )
    wanted = [PICTURE if token == unknown else token for token in served]
    assert [*wanted, *answer, vocabulary.tts_eos] in trained


def test_picture_of_a_unit_has_the_rows_of_the_worker(
    parts: PreparerParts, builder: SessionBuilder, vocabulary: Vocabulary
) -> None:
    session = next(
        one for one in (builder.draw((1, seed)) for seed in range(50)) if one.view.frames[0] >= 0
    )
    drawn = (session_sequence(session, vocabulary, Random(n), voice_rows=0) for n in range(50))
    row = next(one for one in drawn if one.first_unit == 0)
    first = row.ids.index(vocabulary.unit)
    marks = vocabulary.id_of("<image>"), vocabulary.id_of("</image>")
    wanted = [vocabulary.unit, marks[0], *[PICTURE] * PICTURE_ROWS, marks[1], *[AUDIO] * 10]
    assert row.ids[first : first + len(wanted)] == wanted
    assert row.pictures == [one for one in session.view.frames if one >= 0]
    assert Batch.of([row]).picture.sum() == PICTURE_ROWS * len(row.pictures)
    sound = np.zeros(16_000, np.float32)
    unit = prepare_unit(
        parts.prompts.pictures, Unit(0, sound, frames=(draw_picture(Random(1)).jpeg(),))
    )
    assert isinstance(unit, Unit)
    assert sum(count_rows(parts.prompts, unit)) == len(wanted)


def test_session_answers_about_the_picture_at_the_start_of_the_answer(
    builder: SessionBuilder,
) -> None:
    judged = 0
    for seed in range(120):
        session = builder.draw((2, seed))
        for one in session.asked:
            kind = one.utterance.exchange.kind
            if kind not in QUESTIONS:
                assert one.answer == one.utterance.exchange.answer
                continue
            picture = session.view.seen(one.first_unit)
            scene = SCENES[picture] if picture >= 0 else None
            assert one.answer == answer_about(kind, scene)
            judged += one.answer != BLIND
    assert judged >= 10


def test_context_without_the_picture_that_is_seen_is_not_trained(
    builder: SessionBuilder, vocabulary: Vocabulary
) -> None:
    for seed in range(60):
        session = builder.draw((3, seed))
        row = session_sequence(session, vocabulary, Random(seed), voice_rows=0)
        assert not row.first_unit or not session.view.hides(row.first_unit)
        shown = [one for one in session.view.frames[row.first_unit :] if one >= 0]
        assert row.pictures == shown


def test_chat_answers_about_its_latest_picture(vocabulary: Vocabulary) -> None:
    bank = PictureBank(SCENES, torch.randn(len(SCENES), 2, PICTURE_ROWS, 32))
    networks = ListenerNetworks.build(small_config(vocabulary), seed=4, batch=1)
    asked = 0
    for seed in range(60):
        row = draw_chat(Random(seed), vocabulary, bank)
        answer = vocabulary.tokenizer.decode([token for token in row.targets if token >= 0])
        if row.pictures and "i see" not in answer:
            scene = SCENES[row.pictures[-1]]
            asked += any(answer.strip() == answer_about(kind, scene) for kind in QUESTIONS)
        batch = Batch.of([row])
        table = embed(networks.llm, batch, [row], bank, Random(seed))
        shown = table[batch.picture].view(-1, PICTURE_ROWS, 32)
        variants = [bank.embeds[picture] for picture in row.pictures]
        for rows, own in zip(shown, variants, strict=True):
            assert any(torch.equal(rows, variant) for variant in own)
    assert asked >= 15


def test_pictures_are_read_as_they_were_written(tmp_path: Path) -> None:
    bank = PictureBank(SCENES, torch.randn(len(SCENES), 2, PICTURE_ROWS, 4).half().float())
    assert tower_of(tmp_path / "bank.pt") is None
    save_bank(bank, tmp_path / "bank.pt", "a digest")
    assert tower_of(tmp_path / "bank.pt") == "a digest"
    found = load_bank(tmp_path / "bank.pt")
    assert found.scenes == SCENES
    assert torch.equal(found.embeds, bank.embeds)


def test_known_tokens_keep_their_rows_in_another_tokenizer() -> None:
    before = Tokenizer(WordLevel({"what": 0, "do": 1, "see": 2, "?": 3}, unk_token="?"))
    before.pre_tokenizer = Whitespace()
    after = Tokenizer(WordLevel({"see": 0, "what do": 1, "what": 2, "?": 3}, unk_token="?"))
    table = torch.randn(4, 8)
    moved = moved_table(table, before, after)
    known = [2, 0, 3]
    torch.testing.assert_close(moved[[0, 2, 3]], table[known])
    torch.testing.assert_close(moved[1], (table[0] + table[1]) / 2)


def test_each_unit_and_answer_must_name_the_picture_that_is_seen(vocabulary: Vocabulary) -> None:
    """An output layer that names scene 1 has a loss only where another picture is seen."""
    networks = ListenerNetworks.build(small_config(vocabulary), seed=4, batch=1)
    seen = SeenLayer(networks.llm.model, 32, SCENES)
    wanted = labels(SCENES[1])
    starts = np.cumsum([0, *HEADS.values()])
    layer = seen.output[1]
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
        for start, label in zip(starts, wanted, strict=False):
            if label >= 0:
                layer.bias[start + label] = 100.0
    unit = [AUDIO, vocabulary.listen]
    picture = [PICTURE] * PICTURE_ROWS
    losses: list[float] = []
    for shown, ids in (([1], [*picture, *unit]), ([1, 2], [*picture, *unit, *picture, *unit])):
        row = TokenRow(pictures=shown)
        for token in ids:
            row.choose(token) if token == vocabulary.listen else row.feed([token])
        batch = Batch.of([row])
        run_decoder(networks.llm.model, torch.zeros(1, len(row.ids), 32))
        losses.append(seen.loss(batch, [row]).item())
    assert losses[0] == pytest.approx(0.0, abs=1e-3)
    assert losses[1] > 10.0
