"""Scores of the words that the recogniser pocketsphinx hears, and a machine without it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from training.corpus.espeak import SynthesisError
from training.evaluation import recogniser
from training.evaluation.recogniser import COMMAND, recognised

TEXTS = ["one two", "three four", "five six"]
SOUNDS = [np.zeros(800, np.float32)] * 3
HEARD = """#!/bin/sh
while [ "$1" != -hyp ]; do shift; done
printf 'one two (0 -100)\\nthree (1 -200)\\n(2 -300)\\n' > "$2"
"""


def install(folder: Path, script: str, patch: pytest.MonkeyPatch) -> None:
    path = folder / COMMAND
    path.write_text(script, encoding="utf-8")
    path.chmod(0o755)
    patch.setenv("PATH", str(folder))


def test_words_are_compared_with_the_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, HEARD, monkeypatch)
    rate = recognised(TEXTS, SOUNDS)
    assert (rate.right, rate.count) == (3, 6)


def test_rate_is_empty_without_the_recogniser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert recognised(TEXTS, SOUNDS).count == 0


def test_failure_of_the_recogniser_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "#!/bin/sh\necho no model >&2\nexit 1\n", monkeypatch)
    with pytest.raises(SynthesisError, match="pocketsphinx_batch fails: no model"):
        recognised(TEXTS, SOUNDS)


def test_recogniser_that_does_not_end_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "#!/bin/sh\nwhile :; do :; done\n", monkeypatch)
    monkeypatch.setattr(recogniser, "LIMIT_S", 0.2)
    with pytest.raises(SynthesisError, match=r"pocketsphinx_batch has not ended after 0\.2 s"):
        recognised(TEXTS, SOUNDS)
