"""A client of duplane's realtime protocols: `DuplexSession` speaks dialects A and B."""

from duplane.client.errors import (
    BusyError,
    ConnectionLostError,
    DuplexError,
    InputError,
    RefusedError,
    ServerError,
    retry_wait_s,
)
from duplane.client.events import INPUT_RATE, OUTPUT_RATE, End, Output, QueuePlace
from duplane.client.resuming import Return
from duplane.client.session import DuplexSession
from duplane.client.sound import EncodedSound, encode

__all__ = [
    "INPUT_RATE",
    "OUTPUT_RATE",
    "BusyError",
    "ConnectionLostError",
    "DuplexError",
    "DuplexSession",
    "EncodedSound",
    "End",
    "InputError",
    "Output",
    "QueuePlace",
    "RefusedError",
    "Return",
    "ServerError",
    "encode",
    "retry_wait_s",
]
