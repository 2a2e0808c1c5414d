"""Lowest and highest values of the fields of the contract.

The edge and the worker check the settings of a conversation, the scheduler checks a worker's model
and its own settings.
"""

from __future__ import annotations

from collections.abc import Mapping

# Longest time in which a caller may claim its slot, as the scheduler's settings allow.
MAX_CLAIM_TIMEOUT_S = 60.0

# Maps each numeric field of DuplexConfig to its lowest and highest value.
DUPLEX_CONFIG: Mapping[str, tuple[float, float]] = {
    "force_listen_count": (0, 3600),
    "max_new_speak_token_count": (1, 256),
    "temperature": (0, 2),
    "top_k": (0, 1_000_000),
    "top_p": (0, 1),
    "text_repetition_penalty": (0.1, 10),
    "text_repetition_window_size": (0, 65_536),
    "length_penalty": (0.1, 5),
    "listen_prob_scale": (0, 1000),
    "listen_top_k": (1, 1_000_000),
    "tts_temperature": (0, 2),
    "basic_window_high_token_count": (1, 1_000_000),
    "basic_window_low_token_count": (0, 1_000_000),
    "context_window_unit_count": (1, 3600),
    "context_window_previous_token_count": (0, 65_536),
}

# Maps each numeric field of ChatConfig to its lowest and highest value.
CHAT_CONFIG: Mapping[str, tuple[float, float]] = {
    "max_new_token_count": (1, 32_768),
    "temperature": (0, 2),
    "top_k": (0, 1_000_000),
    "top_p": (0, 1),
    "length_penalty": (0.1, 5),
    "repetition_penalty": (0.1, 10),
    "max_slice_count": (1, 9),
}

# Lowest and highest values of the fields of Model that are present: the duration of a unit, and the
# sample rates of input and output.
UNIT_DURATION_S = (0.01, 10.0)
SAMPLE_RATE_HERTZ = (4_000, 192_000)

# Maximum number of units of one `Rebuild` message; the edge splits a longer conversation. The
# worker checks all units of a message before it handles other sessions again, so their number is
# bounded. Units of one second reach the bound on the bytes of a message earlier, so the bound on
# the number affects only very short units.
MAX_REBUILD_UNIT_COUNT = 1024

# Maximum number of bytes of `Delta.rebuild_state` and of `Delta.state_change`. A worker refuses to
# rebuild a conversation with a larger state. An edge does not keep one: the session goes on, but
# can no longer move.
MAX_STATE_BYTES = 64 * 1024

# Maximum number of bytes of `Unit.edge_note` and of `Keep.edge_note`.
MAX_NOTE_BYTES = 4096

# Maximum number of characters of `AcquireLeaseRequest.queue_token`.
MAX_QUEUE_TOKEN_LENGTH = 512

# Longest time for which a worker keeps the copy of a session without a call (`Keep.within`).
MAX_KEEP_S = 3600.0

# Lowest and highest value of `Keep.window_count`.
WINDOW_COUNT = (2, 64)

# Maximum number of unfinished speech requests of a conversation, and maximum number of bytes of the
# text of one. More requests and longer texts are refused.
MAX_SPEECH_REQUESTS = 8
MAX_SPEECH_TEXT_BYTES = 2000

# Largest number of pictures that a client may ask for from each second of a video.
MAX_STACK_FRAME_COUNT = 10
