"""What the tests of training share."""

from __future__ import annotations

import pytest

from training.vocabulary import Vocabulary, build_tokenizer


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return Vocabulary(build_tokenizer())
