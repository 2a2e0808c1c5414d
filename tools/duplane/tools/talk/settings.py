"""Settings of `duplane talk`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

from cyclopts import Parameter, Token
from cyclopts.types import ExistingFile

from duplane.fabric.settings import NonNegativeFloat, check_bounds

Dialect = Literal["A", "B", "C", "D", "E", "H", "L"]
Mode = Literal["audio", "video", "chat"]
DIALECTS = ("A", "B", "C", "D", "E", "H", "L")
DEFAULT_URL = "ws://127.0.0.1:8006"


def _capital(_: object, tokens: Sequence[Token]) -> str:
    name = tokens[0].value.upper()
    if name not in DIALECTS:
        raise ValueError(f"must be one of {', '.join(DIALECTS)}")
    return name


@Parameter(name="*")
@dataclass(frozen=True)
class TalkSettings:
    """Settings of `duplane talk`. Raises ValueError naming the invalid setting."""

    wav: ExistingFile | None = None
    """Sound file to send, in any format of libsndfile. Default: a recording in which a synthetic
    voice asks questions; in mode video it asks about a picture of three stars, which is sent too if
    no other is named."""
    _: KW_ONLY
    url: str = DEFAULT_URL
    """Server, with or without a path."""
    dialect: Annotated[Dialect, Parameter(converter=_capital)] = "A"
    """Protocol to use. H (half duplex) is a chat: the default model of `duplane up` understands
    speech in the full duplex dialects only."""
    mode: Mode = "audio"
    """Kind of session; dialect D is always a chat, and E, H and L have only audio."""
    frames: Annotated[tuple[ExistingFile, ...], Parameter("--frame", negative=())] = ()
    """Picture; may be repeated. Each unit of a session gets the next picture in turn; a chat sends
    all pictures with the first text."""
    videos: Annotated[tuple[ExistingFile, ...], Parameter("--video", negative=())] = ()
    """Video file that is sent with the first text of a chat. May be repeated."""
    texts: Annotated[tuple[str, ...], Parameter("--text", negative=())] = ()
    """Text of one turn of a chat. May be repeated."""
    prompt: str = "You are a helpful assistant."
    """System prompt."""
    voice: ExistingFile | None = None
    """Sound file with the voice that the model imitates."""
    seed: int | None = None
    """Seed of the session: the same seed and sound give the same answers. Dialect B only."""
    resume: Annotated[bool, Parameter(negative=())] = False
    """Return to the conversation on a new connection if this one is lost, and if the server shuts
    down and another one answers at the same address. Dialects A and B, mode audio or video."""
    ca: ExistingFile | None = None
    """Certificates (PEM) to trust with wss://, in place of the system's."""
    key_file: ExistingFile | None = None
    """File with the API key or the token that the client shows. Other users must not be able to
    read it."""
    tail_s: Annotated[NonNegativeFloat, Parameter("--tail")] = 5.0
    """Seconds of silence to send after the file."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.dialect in ("E", "H", "L") and self.mode != "audio":
            raise ValueError(f"mode: dialect {self.dialect} has only audio")
        if self.seed is not None and (self.dialect != "B" or self.is_chat):
            raise ValueError("seed: sessions have a seed only in dialect B, mode audio or video")
        if self.resume and (self.dialect not in ("A", "B") or self.is_chat):
            raise ValueError("resume: only for dialects A and B, mode audio or video")

    @property
    def is_chat(self) -> bool:
        """True if the client sends turns of text, not units of audio."""
        return self.mode == "chat" or self.dialect == "D"
