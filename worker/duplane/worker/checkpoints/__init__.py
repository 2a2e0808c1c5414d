"""The default checkpoint: a small model, trained by `make train`."""

from __future__ import annotations

from pathlib import Path

DEFAULT_CHECKPOINT = Path(__file__).parent / "default"
