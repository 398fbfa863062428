"""The architecture holds, and every rule of its checker is seen to fire on a planted violation.

A checker that cannot fail protects nothing: each rule is shown one file that breaks it, and one
that looks alike and does not.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.planted import DOCSTRING, broken, plant
from tools.architecture import MACHINES, MAY_IMPORT, check, name_violations
from tools.sources import parsed

ROOT = Path(__file__).resolve().parents[2]


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
    ("importer", "refused"),
    [
        ("http", set(MAY_IMPORT) - {"http"}),
        ("device", {"server", "sim", "study", "cli"}),
        ("sim", {"server", "study", "device", "cli"}),
        ("study", {"server", "cli"}),
    ],
)
def test_the_drivers_know_each_other_in_one_direction(
    tmp_path: Path, importer: str, refused: set[str]
) -> None:
    """Written out again: a package that is added to a row of MAY_IMPORT fails here."""
    for imported in sorted(refused):
        found = broken(tmp_path, f"papaya/{importer}/x.py", f"import papaya.{imported}.y\n")
        assert found == [(2, "imports")], imported


@pytest.mark.parametrize(
    "statement",
    [
        "import papaya.server.host",
        "import papaya\nx = papaya.server",
        "import papaya as p\nx = p.server.host.Host",
        "from importlib import import_module\nx = import_module('papaya.server.server')",
        "import importlib\nx = importlib.import_module(f'papaya.server.{y}')",
        "x = __import__('papaya.server')",
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


# --- Rule 3: unique names


def names_found(*bodies: str) -> list[str]:
    """What the rule says about papaya/sim/a.py, b.py and so on."""
    sources = []
    for letter, body in zip("abc", bodies, strict=False):
        sources.append(parsed(f"papaya/sim/{letter}.py", f"{DOCSTRING}{body}\n"))
    return [str(violation) for violation in name_violations(sources)]


@pytest.mark.parametrize(
    "definition",
    [
        "class Answer: ...",
        "Answer = A | B",
        "Answer = Callable[[], float]",
        "Answer: TypeAlias = int",
        "Answer: TypeAlias = 'A | B'",
        "Answer = NewType('Answer', int)",
        "if TYPE_CHECKING: Answer = A | B",
    ],
)
@pytest.mark.parametrize("other", ["class Answer: ...", "Answer = X | Y"])
def test_a_public_name_is_defined_once(definition: str, other: str) -> None:
    wrong = "`Answer` is also defined at papaya/sim/a.py:2; rename one of the two [names]"
    assert names_found(definition, f"\n{other}", definition) == [
        f"papaya/sim/b.py:3: {wrong}",
        f"papaya/sim/c.py:2: {wrong}",
    ]


@pytest.mark.parametrize(
    "definition",
    [
        "class _Answer: ...",
        "_Answer = A | B",
        "ANSWER = 1",
        "answer = 1",
        "T = TypeVar('T')",
        "Kind = TypeVar('Kind', bound=int)",
        "from papaya.sim.x import Answer",
        "class _A:\n    class Answer: ...",
        "def f() -> None:\n    class Answer: ...",
        "x.Answer = 1",
    ],
)
def test_other_names_may_repeat(definition: str) -> None:
    assert names_found(definition, definition) == []


def test_a_name_defined_after_a_failed_import_counts() -> None:
    fallback = "try: import x\nexcept ImportError: Answer = A | B"
    assert len(names_found("class Answer: ...", fallback)) == 1


def test_one_file_may_define_a_name_in_two_branches() -> None:
    assert names_found("if x:\n    class A: ...\nelse:\n    class A: ...") == []


# --- Rule 4: files


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
    command = [sys.executable, "-m", "tools.architecture", str(tmp_path)]
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stdout == (
        "papaya/selector/selector.py:3: imports `time`; take `now` as an argument [purity]\n"
    )
    plant(tmp_path, "papaya/selector/selector.py", "")
    passed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (passed.returncode, passed.stdout) == (0, "")
