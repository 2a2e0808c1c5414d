"""Messages of a client that continues a conversation on a worker with a scripted model."""

from __future__ import annotations

from support.worker.scripted_model import PROMPT_TOKENS, UNIT_TOKENS
from support.worker.worker_harness import Client

from duplane.fabric.v1 import session_pb2

DIGEST = "scripted-0"


def context(unit_count: int) -> int:
    """Return the number of tokens in the context after `unit_count` units."""
    return PROMPT_TOKENS + unit_count * UNIT_TOKENS


def past(sequence: int, count: int | None = None, **fields: object) -> session_pb2.PastUnit:
    """Return the past unit `sequence`, which is the `count`-th unit of its conversation.

    By default `count` is `sequence` + 1. If it is smaller, earlier units have failed.
    """
    return session_pb2.PastUnit(
        **{  # pyright: ignore[reportArgumentType] - tests replace any field
            "sequence": sequence,
            "audio_int16": bytes(32_000),
            "token_ids": [1],
            "state_change": session_pb2.StateChange(draw_count=2),
            "context_token_count": context(sequence + 1 if count is None else count),
            **fields,
        }
    )


def rebuild(
    *units: session_pb2.PastUnit, is_last: bool = True, model_digest: str = DIGEST
) -> session_pb2.ConverseRequest:
    return session_pb2.ConverseRequest(
        rebuild=session_pb2.Rebuild(units=units, is_last=is_last, model_digest=model_digest)
    )


async def rebuilt(client: Client) -> session_pb2.Rebuilt:
    response = await client.read()
    assert response.WhichOneof("message") == "rebuilt", response
    return response.rebuilt
