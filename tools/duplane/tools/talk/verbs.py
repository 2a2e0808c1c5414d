"""The verbs that act as a client: talk and replay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.types import ExistingDirectory

from duplane.tools.command import app
from duplane.tools.talk.settings import DEFAULT_URL, TalkSettings


@app.command
def talk(
    settings: TalkSettings = TalkSettings(),
    *,
    out: Path | None = None,
    as_json: Annotated[bool, Parameter("--json", negative=())] = False,
) -> None:
    """Send a sound file to a server at real-time pace, or chat with it, and show the answers.

    Prints one row per unit: decision, text, length of audio, latency. In a chat and in half duplex
    (H), prints one row per answer; in E, only rows of units in which the model speaks. Exit code 0
    means that every unit was answered and the session closed normally.

    Parameters
    ----------
    out
        Write the reply to this file, as a 24 kHz WAV.
    as_json
        Print one JSON object per row.
    """
    if settings.is_chat:
        from duplane.tools.talk.chat import chat_with as converse
    elif settings.dialect == "H":
        from duplane.tools.talk.half_duplex import listen_to as converse
    else:
        from duplane.tools.talk.duplex import talk_to as converse
    converse(settings, out=out, as_json=as_json)


@app.command
def replay(
    directory: ExistingDirectory,
    /,
    *,
    url: str = DEFAULT_URL,
    pace: Literal["recorded", "answered"] = "answered",
) -> int:
    """Send the client events of a recorded session again and compare the answers.

    Prints one row per server event: type, text and length of audio, recorded and replayed. Exit
    code 0 means that all agree, as they should if the session has a seed or decodes greedily.

    Parameters
    ----------
    directory
        Recording of one session.
    url
        Server, with or without a path.
    pace
        `recorded`: send each event at its recorded time. `answered`: send each event when the
        answers that preceded it in the recording have arrived.
    """
    from duplane.tools.talk.replay import replay_recording

    return replay_recording(directory, url, is_paced=pace == "recorded")
