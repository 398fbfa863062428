"""The architecture holds, and every rule of its checker is seen to fire on a planted violation.

A checker that cannot fail protects nothing: each rule is shown one file that breaks it, and one
that looks alike and does not.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.architecture import (
    MACHINES,
    MAY_IMPORT,
    PURE,
    check,
)

ROOT = Path(__file__).resolve().parents[2]
DOCSTRING = '"""A planted module."""\n'


def plant(root: Path, file: str, body: str) -> None:
    """Writes a module that starts with a docstring, so that `body` begins on line 2."""
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(DOCSTRING + body, encoding="utf-8")


def broken(root: Path, file: str, body: str) -> list[tuple[int, str]]:
    """Line and rule of all that the checker finds in one planted file."""
    plant(root, file, body)
    found = check(root)
    assert {violation.file for violation in found} <= {file}
    return [(violation.line, violation.rule) for violation in found]


def test_this_tree_keeps_every_rule() -> None:
    assert [str(violation) for violation in check(ROOT)] == []


# --- Rule 1: imports


def test_the_import_table_has_no_cycle() -> None:
    """A table that allows a cycle would call every direction the right one."""
    placed: set[str] = set()
    while ready := {p for p in MAY_IMPORT if p not in placed and placed.issuperset(MAY_IMPORT[p])}:
        placed |= ready
    assert placed == set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("errors.py", "config"),
        ("config.py", "messages"),
        ("messages/ids.py", "machine"),
        ("machine.py", "coordinator"),
        ("coordinator/placement.py", "server"),
        ("selector/routing.py", "sim"),
        ("client/session.py", "store"),
        ("aggregator/upload.py", "attestation"),
        ("selector/pacing.py", "learning"),
        ("learning/weighting.py", "messages"),
        ("secagg/mask.py", "errors"),
        ("tsa/evidence.py", "messages"),
        ("verifiable_log/merkle.py", "errors"),
        ("store/lease.py", "server"),
        ("server/host.py", "sim"),
        ("sim/engine.py", "server"),
        ("sim/report.py", "cli"),
    ],
)
def test_a_package_imports_only_earlier_layers(
    tmp_path: Path, importer: str, imported: str
) -> None:
    body = f"from papaya.{imported} import thing\n"
    assert broken(tmp_path, f"papaya/{importer}", body) == [(2, "imports")]


@pytest.mark.parametrize("importer", MACHINES)
def test_machines_do_not_import_each_other(tmp_path: Path, importer: str) -> None:
    others = [machine for machine in MACHINES if machine != importer]
    body = "".join(f"import papaya.{machine}\n" for machine in (*others, importer))
    expected = [(2, "imports"), (3, "imports"), (4, "imports")]
    assert broken(tmp_path, f"papaya/{importer}/x.py", body) == expected


@pytest.mark.parametrize(
    "statement",
    [
        "import papaya.server.host",
        "import papaya.server as driver",
        "from papaya import server",
        "from papaya.server.host import Host",
        "from .. import server",
        "from ..server import host",
        "from ..server.host import Host",
        "def late() -> None:\n    import papaya.server",
    ],
)
def test_no_spelling_hides_an_import(tmp_path: Path, statement: str) -> None:
    [(_, rule)] = broken(tmp_path, "papaya/sim/engine.py", f"{statement}\n")
    assert rule == "imports"


def test_earlier_layers_and_the_own_package_are_free(tmp_path: Path) -> None:
    body = (
        "from papaya import __version__\n"
        "from papaya.errors import ConfigError\n"
        "from ..machine import Machine\n"
        "from . import session\n"
        "from .session import Session\n"
    )
    assert broken(tmp_path, "papaya/client/client.py", body) == []


def test_a_package_without_a_row_is_reported(tmp_path: Path) -> None:
    assert broken(tmp_path, "papaya/utils/misc.py", "") == [(1, "imports")]


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("papaya/secagg/mask.py", "msgspec"),
        ("papaya/tsa/evidence.py", "requests"),
        ("papaya/verifiable_log/note.py", "msgspec"),
        ("papaya/learning/weighting.py", "torch"),
        ("papaya/learning/torch/engine.py", "scipy"),
    ],
)
def test_measured_and_learning_code_names_its_dependencies(
    tmp_path: Path, file: str, module: str
) -> None:
    assert broken(tmp_path, file, f"import {module}.part\n") == [(2, "third-party")]


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("papaya/secagg/mask.py", "cryptography.hazmat"),
        ("papaya/secagg/mask.py", "hashlib"),
        ("papaya/learning/parameters.py", "msgspec"),
        ("papaya/learning/torch/engine.py", "torch"),
        ("papaya/cli/main.py", "rich"),
    ],
)
def test_allowed_dependencies_pass(tmp_path: Path, file: str, module: str) -> None:
    assert broken(tmp_path, file, f"import {module}\n") == []


# --- Rule 2: purity

# Written out again, so that a name lost from the checker's table is missed here.
FORBIDDEN_TO_MACHINES = (
    *("time", "datetime", "random", "secrets", "uuid", "asyncio", "concurrent", "io", "logging"),
    *("multiprocessing", "os", "pathlib", "socket", "sqlite3", "subprocess", "threading"),
)


@pytest.mark.parametrize(
    "statement",
    [
        *(f"import {module}" for module in FORBIDDEN_TO_MACHINES),
        "import os.path",
        "from concurrent.futures import Future",
        "from random import random",
        "from random import SystemRandom",
        "import numpy.random",
        "from numpy import random",
        "from numpy.random import default_rng",
        "rng = np.random.default_rng()",
        "x = open('f')",
        "print('x')",
        "x = input()",
        "x = hash('x')",
        "x = id(print)",
        "key = X25519PrivateKey.generate()",
    ],
)
def test_a_machine_touches_nothing_outside(tmp_path: Path, statement: str) -> None:
    assert broken(tmp_path, "papaya/aggregator/held_task.py", f"{statement}\n") == [(2, "purity")]


@pytest.mark.parametrize("package", PURE)
def test_purity_covers_each_pure_package(tmp_path: Path, package: str) -> None:
    file = "papaya/machine.py" if package == "machine" else f"papaya/{package}/x.py"
    assert broken(tmp_path, file, "import time\n") == [(2, "purity")]


@pytest.mark.parametrize(
    "statement",
    ["from random import Random", "import numpy as np", "store.open(1)", "from papaya import time"],
)
def test_look_alikes_are_pure(tmp_path: Path, statement: str) -> None:
    assert broken(tmp_path, "papaya/selector/pacing.py", f"{statement}\n") == []


def test_drivers_may_read_the_clock(tmp_path: Path) -> None:
    assert broken(tmp_path, "papaya/server/host.py", "import time\nprint(time.time())\n") == []


LOOPS_OVER_A_SET = {
    "literal": "for x in {1, 2}: pass",
    "call": "for x in set(y): pass",
    "frozenset": "for x in frozenset(y): pass",
    "set comprehension": "for x in {z for z in y}: pass",
    "comprehension": "x = [z for z in {1, 2}]",
    "generator": "x = any(z for z in set(y))",
    "argument": "def f(a: set[int]) -> None:\n    for x in a: pass",
    "optional argument": "def f(*, a: 'frozenset[int] | None') -> None: [*(a or ())]",
    "variable": "a: Final[set[int]] = make()\nfor x in a: pass",
    "inferred": "a = {1, 2}\nfor x in a: pass",
    "walrus": "if a := set(y):\n    for x in a: pass",
    "field": "class A:\n    a: AbstractSet[int]\n    def f(self) -> None: [*self.a]",
    "attribute": "class A:\n    def f(self) -> None:\n        for x in self.a: pass\n"
    "    def __init__(self) -> None:\n        self.a: set[int] = set()",
    "another object": "class A:\n    a: set[int]\ndef f(b: A) -> None:\n    for x in b.a: pass",
    "function": "def f() -> set[int]: ...\nfor x in f(): pass",
    "property": "class A:\n    @property\n    def a(self) -> set[int]: ...\n"
    "    def f(self) -> None:\n        for x in self.a: pass",
    "dictionary of sets": "a: dict[str, set[int]] = {}\nfor x in a['k']: pass",
    "default": "a: dict[str, set[int]] = {}\nfor x in a.get('k', set()): pass",
    "values": "a: dict[str, set[int]] = {}\nfor b in a.values():\n    for x in b: pass",
    "items": "a: dict[str, set[int]] = {}\nfor k, b in a.items():\n    for x in b: pass",
    "union": "a: set[int] = make()\nfor x in a | b: pass",
    "method": "a: set[int] = make()\nfor x in a.difference(b): pass",
    "views": "for x in a.keys() - b: pass",
    "list": "a = list({1, 2})",
    "star": "a = [*{1, 2}]",
    "join": "a = ','.join({'x', 'y'})",
    "pop": "a = {1, 2}\na.pop()",
    "yield from": "def f(a: set[int]) -> object:\n    yield from a",
}


@pytest.mark.parametrize("case", LOOPS_OVER_A_SET)
def test_a_machine_never_shows_the_order_of_a_set(tmp_path: Path, case: str) -> None:
    found = broken(tmp_path, "papaya/coordinator/x.py", LOOPS_OVER_A_SET[case] + "\n")
    assert [rule for _, rule in found] == ["set-order"]


ORDERED = {
    "sorted": "for x in sorted({1, 2}): pass",
    "membership": "a = {1, 2}\nb = [x for x in y if x in a]",
    "size": "a = len({1, 2})",
    "dictionary": "a: dict[int, None] = {}\nfor x in a.keys(): pass",
    "the keys of sets": "a: dict[str, set[int]] = {}\nfor x in a:\n    for y in x: pass",
    "another scope": "def f(a: set[int]) -> None: ...\ndef g(a: list[int]) -> None: [*a]",
    "bound again": "a = {1, 2}\na = sorted(a)\nfor x in a: pass",
    "arithmetic": "for x in range(a - b): pass",
    "list pop": "a = [1, 2]\na.pop()",
}


@pytest.mark.parametrize("case", ORDERED)
def test_ordered_loops_are_free(tmp_path: Path, case: str) -> None:
    assert broken(tmp_path, "papaya/coordinator/x.py", ORDERED[case] + "\n") == []


# --- Rule 3: files


@pytest.mark.parametrize("text", ["", "x = 1\n", "# comment\n", '""" """\n'])
def test_every_module_has_a_docstring(tmp_path: Path, text: str) -> None:
    plant(tmp_path, "papaya/sim/__init__.py", "")
    (tmp_path / "papaya/sim/__init__.py").write_text(text, encoding="utf-8")
    assert [(v.line, v.rule) for v in check(tmp_path)] == [(1, "docstring")]


def test_what_does_not_parse_is_reported(tmp_path: Path) -> None:
    assert broken(tmp_path, "papaya/sim/x.py", "x = = 1\n") == [(2, "syntax")]


# --- The command


def test_the_command_prints_place_wrong_and_remedy_and_fails(tmp_path: Path) -> None:
    plant(tmp_path, "papaya/selector/selector.py", "\nimport time\n")
    command = [sys.executable, str(ROOT / "tools/architecture.py"), str(tmp_path)]
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stdout == (
        "papaya/selector/selector.py:3: a machine imports `time`; "
        "take `now` as an argument [purity]\n"
    )
    plant(tmp_path, "papaya/selector/selector.py", "")
    passed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (passed.returncode, passed.stdout) == (0, "")
