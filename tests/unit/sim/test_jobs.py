"""Work in several processes: none is waited for in vain, and none is left behind."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from papaya.errors import OperatorError
from papaya.sim.jobs import Tell, _Worker, mapping, take_away_parts, write_whole

PATIENCE_S = 300.0


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


def tell_and_wait(fifo: Path, amount: float, *, tell: Tell) -> float:
    """Until somebody has heard, and opens the other end."""
    tell(amount)
    os.close(os.open(fifo, os.O_RDONLY))
    tell(1.0)
    return amount


def tell_one(number: int, *, tell: Tell) -> int:
    tell(1.0)
    return number


def die_while_telling(number: int, *, tell: Tell) -> int:
    """Between taking the lock of the counter and giving it back."""
    if number == 2:
        _Worker.done.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


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


def test_what_workers_tell_while_they_work_is_heard(tmp_path: Path) -> None:
    """The worker waits until it was heard: it would wait for ever if that were at its end."""
    fifo = tmp_path / "heard"
    os.mkfifo(fifo)
    amounts: list[float] = []

    def hear(amount: float) -> None:
        amounts.append(amount)
        if len(amounts) == 1:
            os.close(os.open(fifo, os.O_WRONLY))

    with mapping(2) as mapped:
        assert list(mapped(partial(tell_and_wait, fifo), (3.0,), hear)) == [3.0]
    assert amounts == [3.0, 1.0]


@pytest.mark.parametrize("jobs", [1, 2])
def test_all_that_is_told_is_heard_before_the_end(jobs: int) -> None:
    """Also the first words of processes that are at work already."""
    amounts: list[float] = []
    with mapping(jobs) as mapped:
        for _ in range(3):
            assert sorted(mapped(tell_one, range(300), amounts.append)) == list(range(300))
    assert sum(amounts) == 900.0


def test_who_turns_away_hears_no_more_of_it() -> None:
    amounts: list[float] = []
    with mapping(2) as mapped:
        abandoned = mapped(tell_one, range(2000), lambda amount: None)
        next(abandoned)
        assert isinstance(abandoned, Generator)
        abandoned.close()
        assert sorted(mapped(tell_one, range(9), amounts.append)) == list(range(9))
    assert 9.0 <= sum(amounts) < 100.0  # those who were at work could not be called back


def test_a_worker_that_dies_while_it_tells_is_told_all_the_same() -> None:
    with pytest.raises(OperatorError, match="a worker process"), mapping(2) as mapped:
        list(mapped(die_while_telling, range(8), lambda amount: None))


def test_an_error_of_who_hears_is_raised_as_it_is() -> None:
    def hear(amount: float) -> None:
        raise ValueError(f"heard {amount:g}")

    with pytest.raises(ValueError, match="heard"), mapping(2) as mapped:
        list(mapped(tell_one, range(8), hear))


def test_a_worker_that_dies_is_told_with_a_remedy() -> None:
    with mapping(2) as m:
        assert list(m(die_at_two, [1])) == [1]
        with pytest.raises(OperatorError, match="a worker process was killed") as e:
            list(m(die_at_two, range(8)))
    assert e.value.hint.startswith("lower --jobs")


def test_a_worker_that_dies_before_any_result_may_be_the_fault_of_the_script() -> None:
    with pytest.raises(OperatorError, match="ended before any") as e, mapping(2) as mapped:
        list(mapped(die_at_two, [2]))
    assert '__name__ == "__main__"' in e.value.hint


def test_work_that_a_broken_pool_ends_is_not_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python 3.11 a thread of the pool fails if both happen at once, and prints a traceback."""
    cancelled: list[Future[Any]] = []
    monkeypatch.setattr(Future, "cancel", cancelled.append)
    with pytest.raises(OperatorError, match="a worker process"), mapping(2) as mapped:
        list(mapped(die_at_two, range(8)))
    assert cancelled == []


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
