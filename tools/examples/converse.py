"""Talks to a worker with the generated stubs alone: python converse.py SCHEDULER FILE.f32

FILE holds raw float32 samples, 16 kHz mono. Prints what the model does with each second.
"""

import queue
import sys
import uuid
from pathlib import Path

import grpc

from duplane.fabric.v1 import lease_pb2, lease_pb2_grpc, session_pb2, session_pb2_grpc

Request = session_pb2.ConverseRequest


def main(scheduler: str, file: str) -> None:
    audio = Path(file).read_bytes()
    seconds = [audio[start : start + 64_000] for start in range(0, len(audio), 64_000)]
    units = [session_pb2.Unit(sequence=n, audio=second) for n, second in enumerate(seconds)]
    pending = iter([*(Request(unit=u) for u in units), Request(close=session_pb2.Close())])
    kind = lease_pb2.SESSION_KIND_AUDIO_DUPLEX
    wish = lease_pb2.AcquireLeaseRequest(request_id=str(uuid.uuid4()), kind=kind)
    leases = lease_pb2_grpc.LeaseServiceStub(grpc.insecure_channel(scheduler))
    granted = next(r.granted for r in leases.AcquireLease(wish) if r.HasField("granted"))
    worker = session_pb2_grpc.SessionServiceStub(grpc.insecure_channel(granted.worker_address))
    requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
    requests.put(Request(claim=session_pb2.Claim(lease=granted.lease)))
    requests.put(Request(open=session_pb2.Open(system_prompt="You are helpful.")))
    for response in worker.Converse(iter(requests.get, None)):
        if response.HasField("delta"):
            speech, sequence = response.delta.speech, response.delta.sequence
            print(sequence, repr(speech.text) if speech.text else "(listens)", len(speech.audio))
        if response.HasField("opened") or response.HasField("delta"):
            requests.put(next(pending))  # the next second once the last is answered


if __name__ == "__main__":
    main(*sys.argv[1:])
