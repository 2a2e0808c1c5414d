"""The sample rates of sound in the public protocols A to D, whatever the rates of the model are."""

from __future__ import annotations

# The clients of A to D send 16 kHz and play 24 kHz: these protocols have no field for a rate.
INPUT_RATE_HERTZ = 16_000
OUTPUT_RATE_HERTZ = 24_000
# Clients send a reference voice that they got over HTTP back in their settings, unchanged.
VOICE_RATE_HERTZ = INPUT_RATE_HERTZ
