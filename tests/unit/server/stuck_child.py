"""A child TSA that never prints its first line."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

PATIENCE_S = 60.0


class StuckChild:
    """Replaces the program that servers of this process start as a TSA; `started` has all of them.

    It says that it runs, and then stops itself: only SIGKILL ends it. Or it does what `then` says.
    """

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, then: str = "kill -STOP $$"
    ) -> None:
        started: list[subprocess.Popen[bytes]] = []

        class Noted(subprocess.Popen[bytes]):
            def __init__(self, *arguments: object, **options: object) -> None:
                super().__init__(*arguments, **options)  # type: ignore[call-overload]
                started.append(self)

        self.started = started
        self._told = folder / "told"
        os.mkfifo(self._told)
        program = folder / "program"
        # <> does not wait for a reader, and 3 stays open: or what was told would be lost.
        program.write_text(f"#!/bin/sh\nexec 3<> '{self._told}'\necho >&3\n{then}\n")
        program.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(program))
        monkeypatch.setattr(subprocess, "Popen", Noted)

    def wait_until_it_runs(self) -> None:
        told = os.open(self._told, os.O_RDWR)  # does not wait for a writer
        try:
            assert select.select([told], [], [], PATIENCE_S)[0]
        finally:
            os.close(told)
