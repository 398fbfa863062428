"""Plants modules in a tree of their own, for the tests of the architecture's checker."""

from pathlib import Path

from tools.architecture import check

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
