"""Sets environment variables that libraries read when they start.

`main` imports this module first. If the operator has set a variable, its value does not change.

With `GRPC_EXPERIMENTS` gRPC reads the sockets of a client in one thread. By default gRPC uses a
pool of threads that wake each other several times per message. Without the pool an edge needs 15 %
less CPU time per unit with 150 sessions, and 9 % less with 40 sessions (gRPC 1.85.1).

With `GRPC_VERBOSITY` gRPC writes no lines of its own to stderr, which would not have the format of
the log. Its errors are exceptions, and the processes log these.

With `GRPC_ENABLE_FORK_SUPPORT` gRPC runs no code of its own in a forked child. By default it does,
and of the programs that uvloop starts beside busy channels 4 % crashed in this code, before they
ran (gRPC 1.85.1). A child of ours executes another program at once and never uses these channels.

With `ORT_DISABLE_TELEMETRY` ONNX Runtime reports nothing. By default its packages for Linux, from
1.29 on, keep an identifier of the machine in a file, and send it to their vendor with facts about
the process and its models (seen with 1.31.1).
"""

import os

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
