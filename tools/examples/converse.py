"""Sends audio to a worker with only the generated stubs: python converse.py SCHEDULER FILE.f32

FILE contains raw mono float32 samples at the model's input rate. Prints the output of each unit."""

import queue
import sys
import uuid
from pathlib import Path

import grpc

from duplane.fabric.v1 import lease_pb2, lease_pb2_grpc, session_pb2, session_pb2_grpc
from duplane.fabric.v1.lease_pb2 import SESSION_KIND_AUDIO_DUPLEX as AUDIO
from duplane.fabric.v1.session_pb2 import ConverseRequest as Request


def main(scheduler: str, file: str) -> None:
    wanted = lease_pb2.AcquireLeaseRequest(request_id=str(uuid.uuid4()), kind=AUDIO)
    leases = lease_pb2_grpc.LeaseServiceStub(grpc.insecure_channel(scheduler))
    grant = next(r.granted for r in leases.AcquireLease(wanted) if r.HasField("granted"))
    size = grant.model.input_rate_hertz * grant.model.unit_duration.ToMilliseconds() // 250 or 64000
    audio = Path(file).read_bytes() + bytes(5 * size)  # silence, in which the model can answer
    sounds = [audio[at : at + size].ljust(size, b"\0") for at in range(0, len(audio), size)]
    units = [Request(unit=session_pb2.Unit(sequence=n, audio=s)) for n, s in enumerate(sounds)]
    later = [Request(open=session_pb2.Open()), *units, Request(close=session_pb2.Close())]
    worker = session_pb2_grpc.SessionServiceStub(grpc.insecure_channel(grant.worker_address))
    requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
    requests.put(Request(claim=session_pb2.Claim(lease=grant.lease)))
    for response in worker.Converse(iter(requests.get, None)):
        if response.HasField("delta"):
            speech = response.delta.speech
            print(response.delta.sequence, speech.text or "(listens)", len(speech.audio))
        if response.HasField("failed"):
            print(response.failed.sequence, response.failed.reason, response.failed.message)
        if later:  # each request is sent after the answer to the request before it
            requests.put(later.pop(0))


if __name__ == "__main__":
    main(*sys.argv[1:])
