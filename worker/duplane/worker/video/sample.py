"""A video of two grey pictures of 16 x 16 pixels, and 0.1 s of silence: MPEG-4 and PCM in Matroska.

The decoder decodes it before it confines itself, so that all modules are imported by then.
"""

from __future__ import annotations

import base64
import zlib

SAMPLE = zlib.decompress(
    base64.b64decode(
        "eNqTcr2/eLFTWyOj03cg/tTI4vS5kcOpqSM3saQovzg70akdKNTayCQR3JDOyAACrHMFfWeXHNjf0lh1faXv7u7g"
        "1S2inivTgtc0LoTwxELWZQN5Z3x39wB5QiGH04PXNDFugnBlgncDJZtYG99ATGMIZqA+ALln2f6WqK4UU63rG5v5"
        "nRx8G1p8EsvSwh3BlEtnh0O/A1gpyLEOD/a3vHQ7e2sd1Ekt1xsZi492QA1jnNPIoLR1TnNpXkpHI0Nbf1i8b4Cr"
        "u4m+Z7C/vmNwQHMjo/Lj5hbZs6kMD7o2NArsahQI2dTIEvqukQHmRSYGhuRF64EmbQAKMG7tFAaSIIMVGI70djCI"
        "MrQwiSQDuZuATks2M9IzstAzNDCCOcbleiMTwjFMqI7pdYwPcPbV9/QL0ffxDGluZHo4cX4j49YOh/0Q3yWlNHKA"
        "XAKKhA/7W9LOmGoVF29KPtCdjPBe+omFros7XEKDHEM8/f1c2icbGFiBkKGeAQwwoGtiwqXJAOh0mCZ5522lziH7"
        "WyxtX4c/b2RYPLWRgaEBaOFmBgF2ILVNjFVi6vb3i51VmoDio2AUjALcYHF3I+MXUHbdFs9kDipEp+9vWeJ21Wl3"
        "/+ZGhu1dwML7YxOT+odGTgBaMF0l"
    )
)
