"""A replay compares the parts of a text with the recorded parts."""

from __future__ import annotations

import pytest

from duplane.tools.golden_replay.check import Verdict, same_texts


@pytest.mark.parametrize(
    ("got", "want", "verdict"),
    [
        (["ab", "c"], ["ab", "c"], Verdict.OK),
        (["你", "好吗"], ["你好", "吗"], Verdict.DIFFERS),
        (["", "好", "吗"], ["好", "", "吗"], Verdict.DIFFERS),
        (["", "好吗"], ["好吗", ""], Verdict.FAIL),
        (["你", "好"], ["你", "坏"], Verdict.FAIL),
        (["你好"], ["你", "好"], Verdict.FAIL),
    ],
    ids=["same", "one later", "one earlier", "two later", "another text", "another count"],
)
def test_only_where_an_incomplete_character_is_held_back_may_differ(
    got: list[str], want: list[str], verdict: Verdict
) -> None:
    assert same_texts("yields", got, want).verdict is verdict
