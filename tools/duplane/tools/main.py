"""Entry point of the `duplane` command: registers every verb and runs it."""

from __future__ import annotations

from duplane.tools import library_environment, servers
from duplane.tools.bench import verbs as bench_verbs
from duplane.tools.certs import verbs as certs_verbs
from duplane.tools.checkpoint import verbs as checkpoint_verbs
from duplane.tools.command import app, main, run
from duplane.tools.doctor import verb as doctor_verb
from duplane.tools.keys import verbs as key_verbs
from duplane.tools.operators import verbs as operator_verbs
from duplane.tools.plan import verb as plan_verb
from duplane.tools.talk import verbs as talk_verbs
from duplane.tools.trace import verb as trace_verb
from duplane.tools.up import verb as up_verb

__all__ = ["app", "library_environment", "main", "run"]

VERBS = (
    *(up_verb, servers, talk_verbs, operator_verbs, key_verbs, trace_verb),
    *(doctor_verb, plan_verb, certs_verbs, checkpoint_verbs, bench_verbs),
)
"""Modules that register verbs when they are imported."""

if __name__ == "__main__":
    main()
