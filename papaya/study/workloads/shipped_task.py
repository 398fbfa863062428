"""A task file for another process or another machine: its content, and its frozen tensors.

A process loads the file from its own path if it is there unchanged, otherwise from a copy in its
own temporary folder.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from papaya.errors import OperatorError
from papaya.learning.task import NO_FILE, LoadedTask, load_task


@dataclass(frozen=True)
class ShippedTask:
    path: Path
    module_hash: str
    content: bytes
    frozen: Path | None

    @classmethod
    def of(cls, loaded: LoadedTask) -> ShippedTask:
        if loaded.path == NO_FILE:
            raise OperatorError(
                "other processes cannot load a Task that is defined in a notebook",
                hint="write the task to a file, or use one process",
            )
        frozen = loaded.task.frozen
        return cls(
            loaded.path.absolute(),
            loaded.module_hash,
            loaded.path.read_bytes(),
            None if frozen is None else Path(frozen).absolute(),
        )

    def load(self) -> LoadedTask:
        if self.path.is_file() and self.path.read_bytes() == self.content:
            loaded = load_task(self.path)
        elif self.frozen is not None and not self.frozen.is_file():
            raise OperatorError(
                f"{self.frozen}, the frozen tensors of the task, is not on this machine",
                hint="copy it to the same path on all machines",
            )
        else:
            loaded = load_task(self._copy(), self.frozen)
        if loaded.module_hash != self.module_hash:
            raise OperatorError(
                f"{self.path} changed during the simulation", hint="run the command again"
            )
        return loaded

    def _copy(self) -> Path:
        from papaya.sim.ray_jobs import own_folder

        folder = own_folder() / hashlib.sha256(self.content).hexdigest()[:16]
        folder.mkdir(exist_ok=True)
        (folder / self.path.name).write_bytes(self.content)
        return folder / self.path.name
