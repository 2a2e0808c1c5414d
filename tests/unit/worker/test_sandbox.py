"""A confined process can compute, write and start threads, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys

import orjson
import pytest

from duplane.worker import sandbox
from duplane.worker.sandbox import SandboxError, confine

pytestmark = pytest.mark.skipif(not sandbox.is_supported(), reason="the system has no seccomp")

# Confines itself, tries each call, and writes the error of each, or "allowed".
ATTEMPTS = """
import ctypes, errno, json, mmap, os, platform, signal, socket, subprocess, sys, threading, time
import numpy as np
from duplane.worker.sandbox import confine

# ptrace, process_vm_readv, io_uring_setup, memfd_create, unshare, clone3, prctl, setrlimit
X86 = dict(ptrace=101, read_memory=310, uring=425, memory_file=319, unshare=272, clone3=435,
           dumpable=157, limits=160)
ARM = dict(ptrace=117, read_memory=270, uring=425, memory_file=279, unshare=97, clone3=435,
           dumpable=167, limits=164)
libc = ctypes.CDLL(None, use_errno=True)
late = threading.Event()

def raw(number):
    if libc.syscall(number, 4, 1, 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "")

def begin_thread():
    threading.Thread(target=late.set).start()
    assert late.wait(30)

parent = os.getppid()
calls = {
    "read": lambda: open("/etc/hostname").read(),
    "write": lambda: open("/tmp/new_file", "w"),
    "list": lambda: os.listdir("/"),
    "stat": lambda: os.stat("/"),
    "unlink": lambda: os.unlink("/tmp/no_such_file"),
    "link": lambda: os.symlink("/", "/tmp/new_link"),
    "socket": lambda: socket.socket(),
    "unix": lambda: socket.socket(socket.AF_UNIX),
    "pair": lambda: socket.socketpair(),
    "fork": lambda: os.fork(),
    "spawn": lambda: subprocess.run(["/bin/true"]),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "kill": lambda: os.kill(os.getpid(), 0),
    "kill_parent": lambda: os.kill(parent, 0),
    "chdir": lambda: os.chdir("/"),
    "pipe": lambda: os.pipe(),
    "user": lambda: os.setuid(os.getuid()),
    "code": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC),
    "thread": begin_thread,
    "memory": lambda: np.ones(1 << 22).sum(),
    "sleep": lambda: time.sleep(0.001),
    **{name: lambda number=number: raw(number)
       for name, number in (X86 if platform.machine() == "x86_64" else ARM).items()},
}

def attempt(call):
    try:
        call()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "allowed"

# A thread that runs already when the process is confined.
may_try, earlier = threading.Event(), {}
def try_late():
    may_try.wait()
    earlier["earlier thread"] = attempt(calls["read"])
thread = threading.Thread(target=try_late)
thread.start()
confine()
may_try.set()
thread.join()
found = {name: attempt(call) for name, call in calls.items()} | earlier
sys.stdout.write(json.dumps(found))
"""
ALLOWED = {"thread", "memory", "sleep"}


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    ran = subprocess.run(
        [sys.executable, "-c", ATTEMPTS], capture_output=True, check=False, timeout=120
    )
    assert ran.returncode == 0, ran.stderr.decode()
    return orjson.loads(ran.stdout)


def test_what_decoding_needs_is_allowed(found: dict[str, str]) -> None:
    assert {name for name, result in found.items() if result == "allowed"} == ALLOWED


def test_everything_else_is_refused_in_all_threads(found: dict[str, str]) -> None:
    refused = {name: result for name, result in found.items() if name not in ALLOWED}
    assert refused.pop("clone3") == "ENOSYS"
    assert len(refused) > 20
    assert "earlier thread" in refused
    assert set(refused.values()) == {"EPERM"}


def test_calls_of_another_architecture_end_the_process() -> None:
    """32-bit calls have other numbers: what is allowed here would be another call there."""
    if os.uname().machine != "x86_64":
        pytest.skip("machine code for x86_64")
    program = """
import ctypes, mmap
from duplane.worker.sandbox import confine
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(b"\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3")  # mov eax, 20; int 0x80; ret
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
confine()
call()
"""
    ran = subprocess.run([sys.executable, "-c", program], check=False, timeout=120)
    assert ran.returncode in (-31, -11)  # SIGSYS; or a kernel without 32-bit calls


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "riscv64")])
def test_other_systems_are_not_supported(
    system: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox.sys, "platform", system)
    monkeypatch.setattr(sandbox.platform, "machine", lambda: machine)
    assert not sandbox.is_supported()
    with pytest.raises(SandboxError, match=machine):
        confine()


def test_another_process_of_the_user_cannot_inspect_a_worker() -> None:
    program = (
        "import ctypes\n"
        "from duplane.worker.sandbox import forbid_inspection\n"
        "forbid_inspection()\n"
        "print(ctypes.CDLL(None).prctl(3))"  # PR_GET_DUMPABLE
    )
    ran = subprocess.run([sys.executable, "-c", program], stdout=-1, check=True, timeout=120)
    assert ran.stdout == b"0\n"
