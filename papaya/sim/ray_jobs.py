"""Work on a Ray cluster: the same functions, the same numbers, on many machines.

    with mapping(jobs=1, ray="auto") as mapped: …      # jobs.py

A piece of work gets copies of the files that it needs, in a folder of its worker process, and what
it writes comes back with its result; this process writes it to the real folder. So machines need
not share a file system, and a sweep that is interrupted resumes. If a worker or its machine is
lost, Ray repeats the pieces that it had; an error in the work itself is not repeated.

Papaya has to be installed on all machines, in the same version: the lab compares the code. Numbers
are the same on processors of the same kind.
"""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

from papaya.errors import OperatorError
from papaya.sim.jobs import Map, SharedFiles, Tell, write_whole

_RETRIES: Final = 10


@contextmanager
def ray_cluster(address: str) -> Iterator[Any]:
    """The module `ray`, connected: `local` starts a cluster on this machine, `auto` finds one."""
    try:
        import ray
    except ImportError as error:
        raise OperatorError(
            "--ray needs the package ray, which is not installed",
            hint="pip install 'papaya-fl[ray]'",
        ) from error
    if ray.is_initialized():  # by the caller, who also ends it
        yield ray
        return
    try:
        ray.init(
            address=None if address == "local" else address,
            include_dashboard=False if address == "local" else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise OperatorError(
            f"cannot connect to the Ray cluster {address!r}: {error}",
            hint="start one with `ray start --head`, or use --ray local",
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def ray_mapping(address: str) -> Iterator[Map]:
    with ray_cluster(address) as ray:
        piece = ray.remote(num_cpus=1, max_retries=_RETRIES)(_piece)

        def mapped(
            work: Callable[..., Any],
            items: Sequence[Any],
            hear: Tell | None = None,
            files: SharedFiles | None = None,
        ) -> Iterator[Any]:
            sent = _Sent(ray, files)
            shared = ray.put(work)
            pending = {
                piece.remote(shared, item, hear is not None, *sent.of(item)): item for item in items
            }
            try:
                while pending:
                    [done], _ = ray.wait(list(pending), num_returns=1)
                    del pending[done]
                    result, told, made = _got(ray, done)
                    if files is not None:
                        for name, content in made.items():
                            _write(files.folder / name, content)
                    if hear is not None:
                        hear(told)
                    yield result
            finally:
                for reference in pending:
                    ray.cancel(reference)

        yield mapped


class _Sent:
    """The needed files of all items, each once in the cluster's memory."""

    def __init__(self, ray: Any, files: SharedFiles | None) -> None:
        self._ray = ray
        self._files = files
        self._references: dict[str, Any] = {}

    def of(self, item: Any) -> tuple[list[str], list[str], list[Any]]:
        """Names of the files that are needed and made, and references to those needed."""
        if self._files is None:
            return [], [], []
        needs, makes = list(self._files.needs(item)), list(self._files.makes(item))
        for name in needs:
            if name not in self._references:
                content = (self._files.folder / name).read_bytes()
                self._references[name] = self._ray.put(content)
        return needs, makes, [self._references[name] for name in needs]


def _got(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise OperatorError(
            f"a piece of work was lost {_RETRIES} times: {error}",
            hint="look for machines that ran out of memory, then run the same command again",
        ) from error


class RayFuture:
    """A piece of work that a pool was given."""

    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray = ray
        self.reference = reference

    def done(self) -> bool:
        return self.wait_for_one([self], 0)

    def wait_for_one(self, futures: Sequence[RayFuture], timeout_s: float | None = None) -> bool:
        """Whether one of them is done; waits for it, but not longer."""
        references = [future.reference for future in futures]
        done, _ = self._ray.wait(references, num_returns=1, timeout=timeout_s)
        return bool(done)

    def result(self) -> Any:
        return _got(self._ray, self.reference)


def wait_for_one(futures: Sequence[Future[Any] | RayFuture]) -> None:
    """All of them are of one pool."""
    first = futures[0]
    if isinstance(first, RayFuture):
        first.wait_for_one([future for future in futures if isinstance(future, RayFuture)])
    else:
        local = [future for future in futures if isinstance(future, Future)]
        wait(local, return_when=FIRST_COMPLETED)


class RayPool:
    """The part of a process pool that client training uses, on a Ray cluster."""

    def __init__(self, address: str) -> None:
        self._connection = ray_cluster(address)
        self._ray = self._connection.__enter__()
        self._call = self._ray.remote(num_cpus=1, max_retries=_RETRIES)(_call)
        # What was called last, and its copy in the cluster's memory.
        self._sent: tuple[Callable[[Any], Any], Any] | None = None

    @property
    def workers(self) -> int:
        """How many pieces can run at a time."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def submit(self, work: Callable[[Any], Any], item: Any) -> RayFuture:
        if self._sent is None or self._sent[0] is not work:
            self._sent = work, self._ray.put(work)
        return RayFuture(self._ray, self._call.remote(self._sent[1], item))

    def shutdown(self, *, cancel_futures: bool = True) -> None:
        self._connection.__exit__(None, None, None)


# -- in a worker ----------------------------------------------------------------------------------


def _call(work: Callable[[Any], Any], item: Any) -> Any:
    return work(item)


def _piece(
    work: Callable[..., Any],
    item: Any,
    tells: bool,
    needs: list[str],
    makes: list[str],
    references: list[Any],
) -> tuple[Any, float, dict[str, bytes]]:
    """The result, how much work was done, and the files that were made."""
    import ray

    options: dict[str, Any] = {}
    told = [0.0]
    if tells:
        options["tell"] = told.append
    if needs or makes:
        options["folder"] = folder = own_folder()
        for name, reference in zip(needs, references, strict=True):
            if not (folder / name).exists():
                _write(folder / name, ray.get(reference))
        for name in makes:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
    result = work(item, **options)
    made = {}
    for name in makes:
        made[name] = (own_folder() / name).read_bytes()
        (own_folder() / name).unlink()
    return result, sum(told), made


@cache
def own_folder() -> Path:
    """Files of this worker process, deleted when it ends."""
    folder = tempfile.mkdtemp(prefix="papaya-ray-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda partly: partly.write_bytes(content))
