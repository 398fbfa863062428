"""Work in several processes: none is waited for in vain, and none is left behind."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from papaya.errors import OperatorError
from papaya.sim.jobs import Tell, mapping, take_away_parts, write_whole

PATIENCE_S = 30.0


def double(number: int) -> int:
    return 2 * number


def die_at_two(number: int) -> int:
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def fail_at_two(number: int) -> int:
    if number == 2:
        raise ValueError("two")
    return number


def never_end(fifo: Path, number: int) -> None:
    """Says that it runs, and holds the pipe open for as long as it lives."""
    os.write(os.open(fifo, os.O_WRONLY), b"%d" % number)
    while True:
        signal.pause()


def work_for_ever(fifo: str) -> None:
    """The main program of a process that is to be ended."""
    with mapping(2) as mapped:
        list(mapped(partial(never_end, Path(fifo)), (1, 2)))


def tell_and_wait(heard: Path, amount: float, *, tell: Tell) -> float:
    tell(amount)
    deadline = time.monotonic() + PATIENCE_S
    while not heard.exists():
        assert time.monotonic() < deadline, "nobody heard"
        time.sleep(0.01)
    tell(1.0)
    return amount


class Watch:
    """A named pipe that ends when all that hold it have ended."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "alive"
        os.mkfifo(self.path)
        self._file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLIN)

    def wait_for(self, workers: int) -> None:
        began = b""
        while len(began) < workers:
            assert self._poll.poll(1000 * PATIENCE_S), "no worker began"
            began += os.read(self._file, 1)

    def wait_for_the_end(self) -> None:
        assert self._poll.poll(1000 * PATIENCE_S), "a worker goes on"
        assert os.read(self._file, 1) == b""

    def close(self) -> None:
        os.close(self._file)


@pytest.mark.parametrize("jobs", [1, 2])
def test_all_is_done_once_and_the_same_processes_take_more(jobs: int) -> None:
    with mapping(jobs) as mapped:
        assert sorted(mapped(double, range(9))) == list(range(0, 18, 2))
        assert sorted(mapped(double, (5, 4))) == [8, 10]


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_workers_tell_while_they_work_is_heard(jobs: int, tmp_path: Path) -> None:
    """A worker waits until what it told was heard: nobody hears only at the end."""
    heard = tmp_path / "heard"
    amounts: list[float] = []

    def hear(amount: float) -> None:
        amounts.append(amount)
        heard.touch()

    with mapping(jobs) as mapped:
        assert list(mapped(partial(tell_and_wait, heard), (3.0,), hear)) == [3.0]
        assert sum(amounts) == 4.0
        assert list(mapped(partial(tell_and_wait, heard), (2.0,), hear)) == [2.0]
    assert sum(amounts) == 7.0


def test_a_worker_that_dies_is_told_with_a_remedy() -> None:
    with pytest.raises(OperatorError, match="one of 2 processes was ended") as e, mapping(2) as m:
        list(m(die_at_two, range(8)))
    assert e.value.hint.startswith("lower --jobs")


def test_an_error_of_the_work_is_raised_as_it_is() -> None:
    with pytest.raises(ValueError, match="two"), mapping(2) as mapped:
        list(mapped(fail_at_two, range(8)))


def test_an_interrupt_ends_the_workers_at_once(tmp_path: Path) -> None:
    with closing(Watch(tmp_path)) as watch:
        program = a_program(watch.path)
        watch.wait_for(2)
        program.send_signal(signal.SIGINT)
        assert program.wait(PATIENCE_S) != 0
        watch.wait_for_the_end()


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_a_parent_that_could_not_end_them(
    tmp_path: Path, by: signal.Signals
) -> None:
    with closing(Watch(tmp_path)) as watch:
        program = a_program(watch.path)
        watch.wait_for(2)
        program.send_signal(by)
        assert program.wait(PATIENCE_S) == -by
        watch.wait_for_the_end()


def test_a_file_is_there_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def fail(partly: Path) -> None:
        partly.write_text("half of it")
        raise OSError(errno.ENOSPC, "full")

    for before in ([], [path]):
        with pytest.raises(OSError, match="full"):
            write_whole(path, fail)
        assert list(tmp_path.iterdir()) == before
        write_whole(path, lambda partly: partly.write_text("whole"))
    assert path.read_text() == "whole"


def test_parts_that_were_left_behind_are_taken_away_after_a_day(tmp_path: Path) -> None:
    parts: list[Path] = []
    for name in ("old", "new"):
        with pytest.raises(KeyboardInterrupt):
            write_whole(tmp_path / name, lambda partly: leave_it(partly, parts))
        parts[-1].write_text("as if its writer had been ended")
    os.utime(parts[0], (0, 0))
    (tmp_path / "whole").touch()
    os.utime(tmp_path / "whole", (0, 0))
    take_away_parts(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([parts[1], tmp_path / "whole"])


def leave_it(partly: Path, parts: list[Path]) -> None:
    parts.append(partly)
    raise KeyboardInterrupt


def a_program(fifo: Path) -> subprocess.Popen[bytes]:
    code = f"from {__name__} import work_for_ever; work_for_ever({str(fifo)!r})"
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
