"""Talks to a worker with the generated stubs alone: python converse.py SCHEDULER FILE.f32

FILE holds raw float32 samples, 16 kHz mono. Prints what the model does with each second.
"""

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import grpc

from duplane.fabric.v1 import lease_pb2, lease_pb2_grpc, session_pb2, session_pb2_grpc

Request = session_pb2.ConverseRequest


def requests(granted: lease_pb2.Granted, audio: bytes) -> Iterator[Request]:
    yield Request(claim=session_pb2.Claim(lease=granted.lease))
    yield Request(open=session_pb2.Open(system_prompt="You are a helpful assistant."))
    for sequence, start in enumerate(range(0, len(audio), 64_000)):
        unit = audio[start : start + 64_000].ljust(64_000, b"\0")
        yield Request(unit=session_pb2.Unit(sequence=sequence, audio=unit))


def main(scheduler: str, file: str) -> None:
    wish = lease_pb2.AcquireLeaseRequest(
        request_id=str(uuid.uuid4()), kind=lease_pb2.SESSION_KIND_AUDIO_DUPLEX
    )
    leases = lease_pb2_grpc.LeaseServiceStub(grpc.insecure_channel(scheduler))
    granted = next(r.granted for r in leases.AcquireLease(wish) if r.HasField("granted"))
    worker = session_pb2_grpc.SessionServiceStub(grpc.insecure_channel(granted.worker_address))
    for response in worker.Converse(requests(granted, Path(file).read_bytes())):
        if response.HasField("delta"):
            speech = response.delta.speech
            print(response.delta.sequence, speech.text or "(listens)", len(speech.audio) // 4)


if __name__ == "__main__":
    main(*sys.argv[1:])
