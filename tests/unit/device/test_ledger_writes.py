"""The ledger of a process that is killed before each of its writes, one after the other.

A small library that is loaded first counts the calls by which SQLite changes files, and kills the
process with SIGKILL before a chosen one. So every write point is met, whatever their number.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from papaya.device.ledger import PrivacyLedger

COMPILER = shutil.which("cc") or shutil.which("g++")
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <sys/types.h>
#include <unistd.h>
#ifdef __cplusplus
extern "C" {
#endif
int papaya_writes = 0, papaya_kill_before = -1;
static void point(void) {
  if (papaya_kill_before >= 0 && papaya_writes++ == papaya_kill_before) kill(getpid(), SIGKILL);
}
#define WRAP(type, name, parameters, arguments)                       \
  type name parameters {                                              \
    static type(*real) parameters = 0;                                \
    if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #name);    \
    point();                                                          \
    return real arguments;                                            \
  }
WRAP(ssize_t, pwrite, (int f, const void *b, size_t n, off_t at), (f, b, n, at))
WRAP(ssize_t, pwrite64, (int f, const void *b, size_t n, off64_t at), (f, b, n, at))
WRAP(int, fsync, (int f), (f))
WRAP(int, fdatasync, (int f), (f))
WRAP(int, ftruncate, (int f, off_t n), (f, n))
WRAP(int, ftruncate64, (int f, off64_t n), (f, n))
WRAP(int, unlink, (const char *path), (path))
#ifdef __cplusplus
}
#endif
"""
# Each child takes part once: a tag, a charge, then the update is sent. The parent is never killed.
RUN = """
import ctypes, os, shutil, signal, sys
from papaya.device.ledger import Allowance, Charge, PrivacyLedger
from papaya.device.use_policy import PrivacyBudget

folder = sys.argv[1]
shim = ctypes.CDLL(None)
limit = ctypes.c_int.in_dll(shim, "papaya_kill_before")
allowance = Allowance(PrivacyBudget(epsilon=50.0, delta=1e-7))
charge = Charge("keyboard", "", "next-word", "train", 1.0, 100)

def take_part(path):
    with PrivacyLedger(path) as ledger:
        ledger.tag(b"p" * 32, lambda size: b"t" * size)
        ledger.spend(charge, allowance, 1.7e9)

first = f"{folder}/first.db"
with PrivacyLedger(first) as ledger:
    ledger.tag(b"o" * 32, lambda size: b"o" * size)
    ledger.spend(charge, allowance, 1.6e9)
for point in range(1000):
    path = f"{folder}/{point}.db"
    shutil.copyfile(first, path)
    if (child := os.fork()) == 0:
        limit.value = point
        take_part(path)
        os.write(1, f"sent {point}\\n".encode())
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        print("points", point, flush=True)
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
"""


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_what_was_sent_is_charged_wherever_the_process_is_killed(tmp_path: Path) -> None:
    assert COMPILER is not None
    source, library = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(SHIM, encoding="ascii")
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"],
        check=True,
        timeout=600,
    )
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)],
        env={"LD_PRELOAD": str(library), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    points = int(last.removeprefix("points "))
    assert points > 10, "two transactions, each with a journal, pages, syncs and a deletion"
    sent = [line for line in done.stdout.splitlines() if line.startswith("sent")]
    assert sent == [f"sent {points}"], "only the one that was not killed has sent anything"
    for point in range(points + 1):
        with PrivacyLedger(tmp_path / f"{point}.db") as ledger:
            [spent] = ledger.spent("keyboard")
            # What was spent before is there, and the new charge is there or not, as a whole.
            assert spent.rho == spent.participations
            assert spent.participations in ((2,) if point == points else (1, 2))
            assert ledger.tag(b"o" * 32, bytes) == b"o" * 16
            tag = ledger.tag(b"p" * 32, bytes)
            assert tag == b"t" * 16 or (tag == bytes(16) and spent.participations == 1)
