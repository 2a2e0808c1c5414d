"""The checkpoint that comes along: a small model, which `duplane checkpoint train` has trained."""

from __future__ import annotations

from pathlib import Path

DEFAULT_CHECKPOINT = Path(__file__).parent / "default"
