"""Texts as data: a file is a client, examples are what the task file makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from papaya.device.texts import lines
from papaya.errors import OperatorError
from papaya.study.data.texts import folder_source, library_source


def texts_in(folder: Path) -> Path:
    (folder / "inner").mkdir()
    (folder / "b.txt").write_text("\n".join(f"b {i}" for i in range(50)))
    (folder / "inner" / "a.md").write_text("\n\n".join(f"a {i}" for i in range(20)))
    (folder / ".hidden").write_text("no")
    (folder / "image.png").write_bytes(b"\x89PNG\0\0")
    return folder


def test_a_file_is_a_client_and_a_line_an_example(tmp_path: Path) -> None:
    source = folder_source(texts_in(tmp_path), lines)
    assert len(source.volumes) == 2
    held = {*source.training(0), *source.held_out(0)}
    assert held < {f"b {i}".encode() for i in range(50)}
    assert all(example.startswith(b"a ") for example in source.training(1))


def test_the_task_files_own_loader_makes_the_examples(tmp_path: Path) -> None:
    source = folder_source(texts_in(tmp_path), lambda text: [w.encode() for w in text.split()])
    assert set(source.training(0)) <= {b"b", *(b"%d" % i for i in range(50))}


def test_text_that_is_not_utf_8_is_read_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_bytes(b"caf\xe9\n" * 2 + b"".join(b"%d\n" % i for i in range(20)))
    assert len(folder_source(tmp_path, lines).volumes) == 1


def test_the_library_has_texts_of_many_lengths_and_no_tests(tmp_path: Path) -> None:
    library = tmp_path / "lib"
    for name, size in (("long.py", 9000), ("short.py", 100), ("test/big.py", 9000)):
        path = library / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"x = {i}\n" for i in range(size // 8)))
    assert len(library_source(lines, library).volumes) == 1


def test_the_real_library_is_heavy_tailed() -> None:
    volumes = library_source(lines).volumes
    assert len(volumes) > 100
    assert volumes.max() > 10 * sorted(volumes.tolist())[len(volumes) // 2]


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="is not a folder"):
        folder_source(tmp_path / "gone", lines)
    with pytest.raises(OperatorError, match="there are no texts in"):
        folder_source(tmp_path, lines)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(OperatorError, match=r"load_examples fails on .*a\.txt: ZeroDivision"):
        folder_source(tmp_path, lambda text: [b""] * (1 // 0))
    with pytest.raises(OperatorError, match=r"load_examples returned a str for .*a\.txt"):
        folder_source(tmp_path, lambda text: [text])  # type: ignore[list-item]
