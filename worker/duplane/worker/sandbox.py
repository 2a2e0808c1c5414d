"""Confines a process that decodes untrusted media: no files, no network, no other processes.

`confine` installs a filter of system calls (seccomp), which the kernel applies to all threads of
the process until its end. Allowed is what decoding from memory and writing to open pipes need;
every other call fails with EPERM. The filter is for Linux on x86_64 and aarch64; elsewhere
`is_supported` is false.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import signal
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME, _PR_SET_NO_NEW_PRIVS = 1, 4, 15, 38
_SET_MODE_FILTER, _GET_ACTION_AVAIL = 1, 2  # operations of seccomp(2)
_ALL_THREADS = 1  # SECCOMP_FILTER_FLAG_TSYNC
_KILL, _ERROR, _ALLOW = 0x8000_0000, 0x0005_0000, 0x7FFF_0000
_CLONE_THREAD, _PROT_EXEC = 0x10000, 4

# Codes of BPF instructions: load a word of the call's data, jump if equal, jump if a bit is set,
# return.
_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # offsets in `struct seccomp_data`
_INSTRUCTION = struct.Struct("=HBBI")
_Instruction = tuple[int, int, int, int]


# The system calls that need no check of their arguments: numbers on x86_64 and on aarch64.
_ALLOWED = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "readv": (19, 65),
    "writev": (20, 66),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "brk": (12, 214),
    "madvise": (28, 233),
    "futex": (202, 98),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101),
    "gettimeofday": (96, 169),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "getrandom": (318, 278),
    "membarrier": (324, 283),
    "restart_syscall": (219, 128),
    "exit": (60, 93),
    "exit_group": (231, 94),
}


@dataclass(frozen=True)
class _Architecture:
    """The system calls of an architecture, by number.

    `allowed` need no check of their arguments. `without_exec` (mmap, mprotect) may give memory that
    is not executable. `prctl` may name a thread, and `clone` may start one.
    """

    audit: int
    seccomp: int
    allowed: tuple[int, ...]
    without_exec: tuple[int, int]
    prctl: int
    clone: int
    clone3: int = 435


_ARCHITECTURES = {
    "x86_64": _Architecture(
        audit=0xC000_003E,
        seccomp=317,
        allowed=tuple(numbers[0] for numbers in _ALLOWED.values()),
        without_exec=(9, 10),
        prctl=157,
        clone=56,
    ),
    "aarch64": _Architecture(
        audit=0xC000_00B7,
        seccomp=277,
        allowed=tuple(numbers[1] for numbers in _ALLOWED.values()),
        without_exec=(222, 226),
        prctl=167,
        clone=220,
    ),
}


class SandboxError(Exception):
    """The process could not be confined. The message says why."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def is_supported() -> bool:
    """Return whether `confine` works on this system."""
    architecture = _architecture()
    if architecture is None:
        return False
    action = ctypes.c_uint32(_ERROR)
    return _seccomp(architecture, _GET_ACTION_AVAIL, 0, ctypes.byref(action)) == 0


def confine() -> None:
    """Confine this process and all its threads, until its end. Raises SandboxError.

    All modules must be imported and all files read before.
    """
    architecture = _architecture()
    if architecture is None:
        raise SandboxError(f"there is no filter for {sys.platform} on {platform.machine()}")
    code = b"".join(_INSTRUCTION.pack(*instruction) for instruction in _filter(architecture))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // _INSTRUCTION.size, ctypes.addressof(buffer))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    result = _seccomp(architecture, _SET_MODE_FILTER, _ALL_THREADS, ctypes.byref(program))
    if result:
        # A positive result is the id of a thread that could not take the filter.
        reason = errno.errorcode.get(ctypes.get_errno(), "?") if result < 0 else f"thread {result}"
        raise SandboxError(f"the system refuses the filter: {reason}")


def forbid_inspection() -> None:
    """Let no other process of the same user read the memory or environment of this process.

    So a decoder that a file has taken over cannot reach the process that started it. Without effect
    on systems other than Linux.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_DUMPABLE, 0)


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread ends that has started it.

    Without effect on systems other than Linux.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _architecture() -> _Architecture | None:
    is_64_bit = sys.maxsize > 2**32
    return _ARCHITECTURES.get(platform.machine()) if sys.platform == "linux" and is_64_bit else None


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _seccomp(architecture: _Architecture, operation: int, flags: int, argument: object) -> int:
    call = _libc().syscall
    call.restype = ctypes.c_long
    return call(
        ctypes.c_long(architecture.seccomp),
        ctypes.c_uint(operation),
        ctypes.c_uint(flags),
        argument,
    )


def _prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    if _libc().prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero):
        raise SandboxError(f"prctl {option} fails: {errno.errorcode.get(ctypes.get_errno(), '?')}")


def _filter(architecture: _Architecture) -> Iterator[_Instruction]:
    """Yield the filter. The kernel runs it before each system call."""
    refused = _return(_ERROR | errno.EPERM)
    yield _LOAD, 0, 0, _ARCHITECTURE_AT
    yield _JUMP_EQUAL, 1, 0, architecture.audit  # the numbers below mean nothing on another one
    yield _return(_KILL)
    yield _LOAD, 0, 0, _NUMBER_AT
    for number in architecture.allowed:
        yield from _when(number, [_return(_ALLOW)])
    for number in architecture.without_exec:
        is_exec = (_JUMP_SET, 0, 1, _PROT_EXEC)
        yield from _when(number, [_argument(2), is_exec, refused, _return(_ALLOW)])
    is_name = (_JUMP_EQUAL, 0, 1, _PR_SET_NAME)
    yield from _when(architecture.prctl, [_argument(0), is_name, _return(_ALLOW), refused])
    is_thread = (_JUMP_SET, 0, 1, _CLONE_THREAD)
    yield from _when(architecture.clone, [_argument(0), is_thread, _return(_ALLOW), refused])
    # A filter cannot read the flags of clone3. After this error glibc uses clone.
    yield from _when(architecture.clone3, [_return(_ERROR | errno.ENOSYS)])
    yield refused


def _when(number: int, instructions: list[_Instruction]) -> Iterator[_Instruction]:
    """Yield instructions that run for one system call only; the last one returns."""
    yield _JUMP_EQUAL, 0, len(instructions), number
    yield from instructions


def _return(action: int) -> _Instruction:
    return _RETURN, 0, 0, action


def _argument(index: int) -> _Instruction:
    """Load the lower half of an argument. Both architectures store it first."""
    return _LOAD, 0, 0, _ARGUMENTS_AT + 8 * index
