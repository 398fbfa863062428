"""Confines the calling process for the rest of its life, by means of the Linux kernel.

    Landlock     files: read below a list of paths, and nothing else
    seccomp      system calls: only those on a list. The list has none for sockets, for starting
                 programs, processes or threads, for signals to others, or for inspecting other
                 processes
    no_new_privs not even a set-uid program can undo either of them

Neither can be undone. New threads are forbidden entirely, because a filter cannot count threads,
and RLIMIT_NPROC counts the threads of all processes of the user and does not apply to root. The
engines compute on one thread. Anything that is not allowed fails with EPERM or EACCES, so a library
that tries something optional continues without it. Open files stay open: close them first.

A job can still see that a file or a process exists, and the size of a file: Landlock does not cover
`stat`. It protects the device from code that it runs. It does not protect the examples that the
code was given: what the code computes from them leaves the device as its update.

Needs Linux 5.13 with Landlock enabled, on x86-64; `missing` says what a machine lacks.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_LIBC = ctypes.CDLL(None, use_errno=True)

_PR_SET_NO_NEW_PRIVS: Final = 38
_LANDLOCK_CREATE_RULESET: Final = 444
_LANDLOCK_ADD_RULE: Final = 445
_LANDLOCK_RESTRICT_SELF: Final = 446
_LANDLOCK_VERSION: Final = 1
_LANDLOCK_PATH_BENEATH: Final = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_SECCOMP: Final = 317
_SECCOMP_SET_MODE_FILTER: Final = 1
_SECCOMP_ALL_THREADS: Final = 1
_SECCOMP_GET_ACTION_AVAIL: Final = 2

# Landlock's version -> how many of its rights for files exist: all of them are handled, so that
# each is refused unless a rule allows it.
_RIGHTS: Final = {1: 13, 2: 14, 3: 15, 4: 15}
_MOST_RIGHTS: Final = 16

# -- system calls of x86-64 ----------------------------------------------------------------------

# fmt: off
_ALLOWED: Final = {
    # memory
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "mremap": 25, "madvise": 28,
    # reading files, within Landlock's rules, and writing to what is open
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8,
    "pread64": 17, "readv": 19, "writev": 20, "access": 21, "dup": 32, "dup2": 33,
    "getcwd": 79, "readlink": 89, "getdents64": 217, "fadvise64": 221, "openat": 257,
    "newfstatat": 262, "readlinkat": 267, "faccessat": 269, "dup3": 292, "statx": 332,
    "faccessat2": 439, "close_range": 436,
    # waiting, and talking to oneself
    "poll": 7, "select": 23, "sched_yield": 24, "pause": 34, "nanosleep": 35, "futex": 202,
    "clock_nanosleep": 230, "pselect6": 270, "ppoll": 271, "pipe": 22, "pipe2": 293,
    "eventfd2": 290, "restart_syscall": 219,
    # signals of this process
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "sigaltstack": 131,
    # threads that exist: new ones need clone, which is not on the list
    "exit": 60, "exit_group": 231, "gettid": 186, "set_tid_address": 218,
    "set_robust_list": 273, "get_robust_list": 274, "membarrier": 324, "rseq": 334,
    "sched_getaffinity": 204, "sched_getparam": 143, "sched_getscheduler": 145,
    "sched_get_priority_max": 146, "sched_get_priority_min": 147, "getcpu": 309,
    # facts about this process and the machine
    "getpid": 39, "uname": 63, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98,
    "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108,
    "getppid": 110, "clock_gettime": 228, "clock_getres": 229, "getrandom": 318,
}
# fmt: on
_IOCTL: Final = 16
_FCNTL: Final = 72
_PRCTL: Final = 157
_TGKILL: Final = 234
_PRLIMIT: Final = 302

# Is it a terminal? Close it in a new program. Python asks these of every file that it opens.
_IOCTLS: Final = (0x5401, 0x5450, 0x5451)
# Copy a descriptor, read and change its flags. With F_SETOWN and F_SETSIG, a write to a pipe could
# send any signal to any process of this user.
_FCNTLS: Final = (0, 1, 2, 3, 4, 1030)
# The name of a thread, and of a memory area.
_PRCTLS: Final = (15, 16, 0x53564D41)

# -- the filter's machine code -------------------------------------------------------------------

_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_X86_64: Final = 0xC000003E
_ALLOW: Final = 0x7FFF0000
_REFUSE: Final = 0x00050000 | errno.EPERM
_KILL: Final = 0x80000000


def missing() -> str | None:
    """What this machine lacks to confine a process; None if it lacks nothing."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"confinement needs x86-64 Linux, this is {platform.machine()} {sys.platform}"
    if _landlock_version() < 1:
        return "this kernel has no Landlock, or it is disabled (Linux 5.13, lsm=landlock,...)"
    action = ctypes.c_uint32(_KILL)
    if _LIBC.syscall(_SECCOMP, _SECCOMP_GET_ACTION_AVAIL, 0, ctypes.byref(action)) != 0:
        return "this kernel has no seccomp filters"
    return None


def engine_paths() -> tuple[Path, ...]:
    """What Python, its packages and their libraries are loaded from.

    The packages may be outside the prefix of Python, as with `pip install --user`. Torch reads the
    features of the processor to choose its kernels.
    """
    places = {sys.prefix, sys.base_prefix, str(Path(__file__).resolve().parents[1])}
    packages = find_spec("numpy")
    if packages is not None and packages.origin is not None:
        places.add(str(Path(packages.origin).parents[1]))
    libraries = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/dev/null")
    processor = ("/proc/cpuinfo", "/sys/devices/system/cpu")
    found = (Path(place) for place in (*sorted(places), *libraries, *processor))
    return tuple(path for path in found if path.exists())


def confine(readable: Iterable[Path]) -> None:
    """Confine this process: it may read below these paths and compute. OSError if it cannot be."""
    paths = tuple(readable)
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _restrict_files(paths)
    _restrict_system_calls()


def _landlock_version() -> int:
    return int(_LIBC.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION))


def _restrict_files(readable: Iterable[Path]) -> None:
    rights = (1 << _RIGHTS.get(_landlock_version(), _MOST_RIGHTS)) - 1
    attributes = ctypes.create_string_buffer(struct.pack("=Q", rights), 8)
    rules = _check(_LIBC.syscall(_LANDLOCK_CREATE_RULESET, attributes, 8, 0), "landlock")
    try:
        for path in readable:
            _allow_reading(rules, path)
        _check(_LIBC.syscall(_LANDLOCK_RESTRICT_SELF, rules, 0), "landlock")
    finally:
        os.close(rules)


def _allow_reading(rules: int, path: Path) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rights = _READ_FILE | (_READ_DIR if path.is_dir() else 0)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, place), 12)
        added = _LIBC.syscall(_LANDLOCK_ADD_RULE, rules, _LANDLOCK_PATH_BENEATH, rule, 0)
        _check(added, f"landlock: {path}")
    finally:
        os.close(place)


def _restrict_system_calls() -> None:
    code = b"".join(_filter(os.getpid()))
    instructions = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(instructions))
    set_filter = (_SECCOMP_SET_MODE_FILTER, _SECCOMP_ALL_THREADS)
    result = _check(_LIBC.syscall(_SECCOMP, *set_filter, ctypes.c_char_p(program)), "seccomp")
    if result != 0:
        raise OSError(
            errno.EBUSY, f"cannot confine this process: seccomp failed in thread {result}"
        )


def _filter(pid: int) -> list[bytes]:
    """Allow what is listed, for this process; refuse the rest."""
    plain = [line for number in _ALLOWED.values() for line in _on(number, [_end(_ALLOW)])]
    return [
        # Another architecture has other numbers. The numbers of x32 are not on the list.
        _load(_ARCHITECTURE_AT),
        _if_equal(_X86_64, 1),
        _end(_KILL),
        _load(_NUMBER_AT),
        *plain,
        *_on(_IOCTL, _if_argument(1, _IOCTLS)),
        *_on(_FCNTL, _if_argument(1, _FCNTLS)),
        *_on(_PRCTL, _if_argument(0, _PRCTLS)),
        # A signal to this process, such as abort() sends.
        *_on(_TGKILL, _if_argument(0, (pid,))),
        # Read a limit of this process: without new values.
        *_on(_PRLIMIT, [*_if_null(2), _end(_REFUSE)]),
        _end(_REFUSE),
    ]


def _on(number: int, then: list[bytes]) -> list[bytes]:
    """If this is the system call, do `then`, which must end."""
    return [_if_equal(number, 0, len(then)), *then]


def _if_argument(place: int, values: Iterable[int]) -> list[bytes]:
    allowed = [line for value in values for line in (_if_equal(value, 0, 1), _end(_ALLOW))]
    return [_load(_ARGUMENTS_AT + 8 * place), *allowed, _end(_REFUSE)]


def _if_null(place: int) -> list[bytes]:
    low = _ARGUMENTS_AT + 8 * place
    return [
        _load(low),
        _if_equal(0, 0, 3),
        _load(low + 4),
        _if_equal(0, 0, 1),
        _end(_ALLOW),
    ]


def _load(offset: int) -> bytes:
    return _instruction(_LOAD, offset)


def _if_equal(value: int, skip_if_true: int, skip_if_false: int = 0) -> bytes:
    return _instruction(_IF_EQUAL, value, skip_if_true, skip_if_false)


def _end(action: int) -> bytes:
    return _instruction(_RETURN, action)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot confine this process: {what}: {os.strerror(number)}")
    return result
