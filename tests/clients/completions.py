"""The client of `openai` for Python against chat completions, in a process of its own.

Arguments: the base URL, and a WAV file with a question. Asks in every form that the package has,
checks each answer by its types, and writes one JSON object: what was answered, and how faults were
raised.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import openai
from openai import OpenAI
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SPOKEN: dict[str, Any] = {"modalities": ["text", "audio"]}


def completion(client: OpenAI, messages: list[Any], **settings: Any) -> ChatCompletion:
    answer = client.chat.completions.with_raw_response.create(
        model="gpt-4o", messages=messages, temperature=0, **settings
    )
    return ChatCompletion.model_validate_json(answer.text, strict=True)


def chunks(client: OpenAI, **settings: Any) -> list[ChatCompletionChunk]:
    with client.chat.completions.create(
        model="gpt-4o", messages=HELLO, stream=True, temperature=0, **settings
    ) as stream:
        return [ChatCompletionChunk.model_validate(each.to_dict(), strict=True) for each in stream]


def models(client: OpenAI) -> list[str]:
    served = [Model.model_validate(each.to_dict(), strict=True) for each in client.models.list()]
    return [*(each.id for each in served), client.models.retrieve("gpt-4o").id]


def text(client: OpenAI) -> dict[str, Any]:
    answer = completion(client, HELLO)
    return {"content": answer.choices[0].message.content, "model": answer.model}


def streamed_text(client: OpenAI) -> dict[str, Any]:
    told = chunks(client, stream_options={"include_usage": True})
    usage = told.pop().usage
    choices = [each.choices[0] for each in told]
    return {
        "content": "".join(choice.delta.content or "" for choice in choices),
        "role": choices[0].delta.role,
        "finish_reason": choices[-1].finish_reason,
        "total_tokens": usage.total_tokens if usage else 0,
    }


def gathered_stream(client: OpenAI) -> str | None:
    """Return the text that the package itself gathers from a stream."""
    with client.chat.completions.stream(model="gpt-4o", messages=HELLO, temperature=0) as stream:
        return stream.get_final_completion().choices[0].message.content


def speech(client: OpenAI) -> dict[str, Any]:
    settings = {**SPOKEN, "audio": {"voice": "alloy", "format": "wav"}}
    audio = completion(client, HELLO, **settings).choices[0].message.audio
    return {"transcript": audio.transcript, "wav": audio.data} if audio else {}


def heard(client: OpenAI, file: Path) -> int | None:
    """Return how many tokens of sound the model got with a spoken question."""
    sound = {"data": base64.b64encode(file.read_bytes()).decode(), "format": "wav"}
    question = [{"role": "user", "content": [{"type": "input_audio", "input_audio": sound}]}]
    usage = completion(client, question).usage
    details = usage.prompt_tokens_details if usage else None
    return details.audio_tokens if details else None


def streamed_speech(client: OpenAI) -> dict[str, Any]:
    told = chunks(client, **SPOKEN, audio={"voice": "alloy", "format": "pcm16"})
    pieces: list[Any] = [each.choices[0].delta.to_dict().get("audio", {}) for each in told]
    return {
        "transcript": "".join(each.get("transcript", "") for each in pieces),
        "pcm_bytes": sum(len(base64.b64decode(each.get("data", ""))) for each in pieces),
    }


def fault(client: OpenAI, **settings: Any) -> list[Any]:
    try:
        client.chat.completions.create(model="gpt-4o", messages=HELLO, **settings)
    except openai.APIStatusError as error:
        return [type(error).__name__, error.code, error.param]
    return []


def main(url: str, file: str) -> None:
    with OpenAI(api_key="K-0123456789", base_url=url, max_retries=0) as client:
        told = {
            "models": models(client),
            "text": text(client),
            "streamed_text": streamed_text(client),
            "gathered_stream": gathered_stream(client),
            "speech": speech(client),
            "heard": heard(client, Path(file)),
            "streamed_speech": streamed_speech(client),
            "faults": [fault(client, n=2), fault(client, temperature=9), fault(client, stop="x")],
        }
    sys.stdout.write(json.dumps(told))


main(*sys.argv[1:])
