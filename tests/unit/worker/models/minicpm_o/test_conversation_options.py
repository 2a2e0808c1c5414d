from typing import Any

import numpy as np
import pytest

from duplane.worker.models.types import ConversationOptions, OptionError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 1.1),
        ("top_k", -1),
        ("length_penalty", 0.0),
        ("text_repetition_penalty", float("inf")),
        ("max_new_speak_tokens_per_chunk", 0),
        ("max_new_speak_tokens_per_chunk", 10_000),
        ("force_listen_count", -1),
        ("listen_top_k", -1),
        ("seed", -1),
        ("llm_voice", np.zeros(0, np.float32)),
        ("llm_voice", np.zeros((2, 8), np.float32)),
        ("llm_voice", np.zeros(61 * 16_000, np.float32)),
        ("tts_voice", np.zeros(8, np.int16)),
        ("tts_voice", np.full(8, np.inf, np.float32)),
    ],
)
def test_an_option_out_of_bounds_is_named(field: str, value: Any) -> None:
    with pytest.raises(OptionError, match=field) as error:
        ConversationOptions(**{field: value})
    assert error.value.field == field


def test_the_defaults_and_the_edges_are_accepted() -> None:
    ConversationOptions()
    ConversationOptions(temperature=0, top_k=0, top_p=0, listen_top_k=0, seed=0)
