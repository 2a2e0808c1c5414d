"""Units with frames: layout, row counts, refusals, and equal results in any batch."""

import io
from collections.abc import Sequence

import numpy as np
import pytest
from PIL import Image
from support.paths import GOLDEN

from duplane.tools.golden_replay.audio import read_audio
from duplane.worker.models.interface import Continue, Part, Unfinished
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.types import PreparedImage
from duplane.worker.models.types import (
    ConversationOptions,
    DecodeMode,
    Unit,
    UnitFailure,
    UnitOutput,
    WindowMode,
)

UNIT = 16_000
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 8 * UNIT)
SILENT = np.zeros(0, np.float32)
GREEDY = ConversationOptions(decode_mode=DecodeMode.GREEDY, force_listen_count=0, seed=0)


def picture(name: str = "sq.png") -> bytes:
    return (GOLDEN / "images" / name).read_bytes()


def jpeg(width: int, height: int) -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 60)).save(written, "JPEG")
    return written.getvalue()


def unit(
    slot: int, number: int | None, *frames: bytes, max_slices: int = 1, force: bool = False
) -> Unit:
    audio = SILENT if number is None else TALK[number * UNIT : (number + 1) * UNIT]
    return Unit(slot, audio, force, frames, max_slices)


def run(model: DuplexModel, units: Sequence[Unit]) -> list[UnitOutput | UnitFailure]:
    results = list(model.step(units))
    model.settle([entry.slot for entry in units])
    return sorted(results, key=lambda result: result.slot)


def one(model: DuplexModel, entry: Unit) -> UnitOutput:
    (result,) = run(model, [entry])
    assert isinstance(result, UnitOutput), result
    return result


def failed(model: DuplexModel, entry: Unit) -> UnitFailure:
    (result,) = run(model, [entry])
    assert isinstance(result, UnitFailure)
    return result


@pytest.mark.parametrize(
    ("number", "frames", "max_slices", "expected"),
    [
        (0, ("sq.png",), 1, (10, 64, 3)),
        (0, ("sq.png", "wide.png", "small.png"), 1, (10, 192, 7)),
        (None, ("sq.png",), 1, (0, 64, 3)),
        (0, (), 1, (10, 0, 1)),
        (None, ("big.png",), 4, (0, 4 * 64, 9)),
    ],
)
def test_what_came_in_is_counted_row_by_row(
    model: DuplexModel,
    number: int | None,
    frames: tuple[str, ...],
    max_slices: int,
    expected: tuple[int, int, int],
) -> None:
    opened = model.open(0, GREEDY)
    entry = unit(0, number, *map(picture, frames), max_slices=max_slices, force=True)
    output = one(model, entry)
    assert (
        output.input_audio_count,
        output.input_video_count,
        output.input_mark_count,
    ) == expected
    assert output.context_length == opened.context_length + sum(expected)
    assert ("vision" in output.stage_s) == bool(frames)


def test_a_conversation_may_begin_with_frames_alone(model: DuplexModel) -> None:
    """The first audio is processed as at the start of a conversation."""
    model.open(0, GREEDY)
    one(model, unit(0, None, picture(), force=True))
    assert model.parts.audio.cache_length(0) == 0
    assert one(model, unit(0, 0, force=True)).is_listen
    assert (model.parts.audio.cache_length(0), model.parts.audio.mel.buffered(0)) == (50, 80)


def test_pictures_can_be_seen_and_fed_in_portions(model: DuplexModel) -> None:
    """Portions of any sizes give the same results."""
    for slot in range(2):
        model.open(slot, GREEDY)
        one(model, unit(slot, 1))
    names = ("sq.png", "wide.png", "big.png", "small.png", "sq.png")
    entries = [model.preparer.unit(unit(slot, 3, *map(picture, names))) for slot in range(2)]
    whole, divided = (entry for entry in entries if isinstance(entry, Unit))
    launched: list[Unfinished] = []
    (result,) = model.accept([divided])
    while isinstance(result, Unfinished):
        launched.append(result)
        granted = {Part.SEE: 2, Part.FEED: 50}.get(result.part, 1)
        result, *_ = model.launch([Continue(1, result.part, granted)])
        if result.slot == 1 and len(launched) == 3:
            with pytest.raises(ValueError, match="amid a unit"):
                list(model.step([unit(1, 4)]))
    tiles = [left.rows for left in launched if left.part is Part.SEE]
    assert tiles == [*range(tiles[0], 0, -2)]
    rows = [left.rows for left in launched if left.part is Part.FEED]
    assert rows == [*range(divided.rows + 2, 0, -50)]  # with the closing ids of the last unit
    (expected,) = run(model, [whole])
    assert isinstance(expected, UnitOutput)
    assert isinstance(result, UnitOutput)
    assert (result.token_ids, result.context_length) == (
        expected.token_ids,
        expected.context_length,
    )
    assert result.input_video_count == expected.input_video_count
    cache = model.llm.cache
    np.testing.assert_allclose(cache.read(0)[0], cache.read(1)[0], atol=5e-5)


def test_what_is_seen_changes_what_follows(model: DuplexModel) -> None:
    for slot in range(3):
        model.open(slot, GREEDY)
    shown = [unit(0, 3), unit(1, 3, picture("sq.png")), unit(2, 3, jpeg(320, 200))]
    run(model, shown)
    cache = model.llm.cache
    keys = [cache.read(slot)[0][:, :, -1] for slot in range(3)]
    assert not np.allclose(keys[0], keys[1])
    assert not np.allclose(keys[1], keys[2])


def test_a_conversation_with_frames_is_what_it_is_alone(model: DuplexModel) -> None:
    scripts = {
        0: [unit(0, 0, picture("big.png"), max_slices=4), unit(0, 1), unit(0, 2, picture())],
        1: [unit(1, 4), unit(1, 5, picture("wide.png")), unit(1, None, picture("small.png"))],
        2: [unit(2, 5), unit(2, 6), unit(2, 7)],
        3: [unit(3, None, jpeg(640, 480), picture()), unit(3, 2), unit(3, 3, force=True)],
    }
    for slot in scripts:
        model.open(slot, GREEDY)
    together: dict[int, list[UnitOutput]] = {slot: [] for slot in scripts}
    for entries in zip(*scripts.values(), strict=True):
        for result in run(model, entries):
            assert isinstance(result, UnitOutput)
            together[result.slot].append(result)
    rows = {slot: model.llm.cache.read(slot)[1].clone() for slot in scripts}
    for slot, entries in scripts.items():
        model.close(slot)
        assert model.is_clean(slot)
        model.open(slot, GREEDY)
        alone = [one(model, entry) for entry in entries]
        assert [o.token_ids for o in alone] == [o.token_ids for o in together[slot]]
        assert [o.context_length for o in alone] == [o.context_length for o in together[slot]]
        np.testing.assert_allclose(model.llm.cache.read(slot)[1], rows[slot], atol=2e-5)


@pytest.mark.parametrize(
    ("frames", "max_slices", "named"),
    [
        ((b"not a picture",), 1, r"frames\[0\]"),
        ((picture(), b""), 1, r"frames\[1\] the image is empty"),
        ((picture(), picture()[:500]), 1, r"frames\[1\]"),
        ((jpeg(4096, 2049),), 1, r"frames\[0\] the image has 4096 x 2049 pixels"),
        ((picture(),), 65, "max_slices"),
        ((picture(),), 0, "max_slices"),
    ],
)
def test_a_bad_picture_is_named_and_the_conversation_goes_on(
    model: DuplexModel, frames: tuple[bytes, ...], max_slices: int, named: str
) -> None:
    model.open(0, GREEDY)
    model.open(1, GREEDY)
    bad = unit(0, 3, *frames, max_slices=max_slices)
    failure, good = run(model, [bad, unit(1, 3)])
    assert isinstance(failure, UnitFailure)
    assert (failure.slot, failure.reason, failure.is_fatal) == (0, "IMAGE_INVALID", False)
    with pytest.raises(AssertionError, match=named):
        raise AssertionError(f"{failure.field} {failure.message}")
    assert isinstance(good, UnitOutput)
    again = one(model, unit(0, 3))
    assert (again.token_ids, again.context_length) == (good.token_ids, good.context_length)


def test_frames_can_be_prepared_ahead(model: DuplexModel) -> None:
    for slot in range(2):
        model.open(slot, GREEDY)
    plain = unit(0, 0, picture("wide.png"), max_slices=3)
    prepared = model.preparer.unit(unit(1, 0, picture("wide.png"), max_slices=3))
    assert isinstance(prepared, Unit)
    assert isinstance(prepared.frames[0], PreparedImage)
    first, second = run(model, [plain, prepared])
    assert isinstance(first, UnitOutput)
    assert isinstance(second, UnitOutput)
    assert first.token_ids == second.token_ids
    refused = model.preparer.unit(unit(1, 0, b"?"))
    assert isinstance(refused, UnitFailure)


def test_frames_that_do_not_fit_are_refused_before_anything_is_touched(model: DuplexModel) -> None:
    model.open(0, GREEDY)
    before = model.context_length(0)
    many = [picture()] * 9
    failure = failed(model, unit(0, 0, *many))
    assert (failure.reason, failure.is_fatal) == ("CONTEXT_FULL", False)
    assert model.context_length(0) == before
    assert one(model, unit(0, 0, *many[:5])).input_video_count == 5 * 64


def test_the_context_never_overflows_whatever_is_shown(model: DuplexModel) -> None:
    for frames in range(1, 7):
        model.open(0, GREEDY)
        results = [run(model, [unit(0, n % 8, *[picture()] * frames)])[0] for n in range(12)]
        kinds = [isinstance(result, UnitOutput) for result in results]
        assert kinds == sorted(kinds, reverse=True), "once full, full"
        assert model.context_length(0) <= model.llm.cache.capacity
        assert not kinds[-1]
        model.close(0)


@pytest.mark.parametrize("mode", [WindowMode.BASIC, WindowMode.CONTEXT])
def test_a_window_makes_room_for_frames(model: DuplexModel, mode: WindowMode) -> None:
    model.open(0, GREEDY_WINDOW[mode])
    for number in range(30):
        frames = [picture()] * (number % 5)
        output = one(model, unit(0, number % 8, *frames))
        assert output.context_length <= model.llm.cache.capacity
        assert model.conversations[0].window.length == model.context_length(0)


GREEDY_WINDOW = {
    mode: ConversationOptions(
        generate_audio=False,
        decode_mode=DecodeMode.GREEDY,
        force_listen_count=0,
        seed=0,
        sliding_window_mode=mode,
        context_previous_max_tokens=40,
    )
    for mode in WindowMode
}
