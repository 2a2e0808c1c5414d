"""The marks around the embeddings of images in duplex units and chat messages."""

import pytest

from duplane.worker.models.minicpm_o.checkpoint import CheckpointError
from duplane.worker.models.minicpm_o.types import Grid
from duplane.worker.models.minicpm_o.vision.layout import (
    ImageMarks,
    chat_layout,
    duplex_layout,
    duplex_rows,
    placeholder_text,
)

MARKS = ImageMarks()


def test_a_frame_without_slices_has_two_marks() -> None:
    assert duplex_layout(MARKS, None) == ("<image>", 0, "</image>")


def test_slices_of_a_frame_have_no_text_between_their_rows() -> None:
    layout = duplex_layout(MARKS, (1, 2))
    assert layout == ("<image>", 0, "</image>", "<slice>", 1, "</slice>", "<slice>", 2, "</slice>")


def test_slices_of_a_chat_image_have_a_line_of_text_per_row() -> None:
    text = placeholder_text(MARKS, chat_layout(MARKS, (2, 2)), 1)
    one = "<slice><unk></slice>"
    assert text == f"<image><unk></image>{one}{one}\n{one}{one}"


def test_a_chat_image_can_have_a_number() -> None:
    text = placeholder_text(MARKS, chat_layout(MARKS, None, image_id=3), 2)
    assert text == "<image_id>3</image_id><image><unk><unk></image>"


@pytest.mark.parametrize("grid", [None, (2, 1), (3, 4)])
def test_both_layouts_contain_every_tile_in_order(grid: Grid | None) -> None:
    count = 1 if grid is None else 1 + grid[0] * grid[1]
    for layout in (duplex_layout(MARKS, grid), chat_layout(MARKS, grid, 0)):
        assert [part for part in layout if isinstance(part, int)] == list(range(count))


def test_context_rows_count_embeddings_and_marks() -> None:
    assert duplex_rows([None], 64) == 66
    assert duplex_rows([None, (3, 2)], 10) == 12 + 7 * 12
    assert duplex_rows([], 64) == 0


def test_marks_are_read_from_the_preprocessor_configuration() -> None:
    marks = ImageMarks.from_json({"im_start": "<a>", "im_end": "</a>", "unk": "?"})
    assert placeholder_text(marks, chat_layout(marks, None), 3) == "<a>???</a>"
    assert not marks.has_id
    assert ImageMarks.from_json({"use_image_id": True}).has_id
    with pytest.raises(CheckpointError, match="slice_end"):
        ImageMarks.from_json({"slice_end": 5})
