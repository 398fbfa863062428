"""Program files: one encoding, and nothing that is damaged reaches the runtime."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec import structs

from papaya.errors import OperatorError
from papaya.learning.definition import ClientSGD, Examples, TaskTerms, module_hash
from papaya.learning.example_fields import Numbers, WordPlaces
from papaya.learning.executorch.program_file import (
    EXECUTORCH_VERSION,
    ProgramHeader,
    decode_program,
    encode_program,
    is_program,
    read_program,
)
from papaya.learning.parameters import Manifest

PROGRAM = bytes(range(200))
START = 24


def a_header(**changes: Any) -> ProgramHeader:
    header = ProgramHeader(
        task="sums",
        source="sha256:ab",
        executorch=EXECUTORCH_VERSION,
        terms=TaskTerms(False, 3, 100, 50, 0.5, None),
        examples=Examples("numbers"),
        fields=(Numbers(2), WordPlaces(1, 8, ("a",), 2)),
        client=ClientSGD(rate=0.1, max_examples=100),
        manifest=Manifest((("weight", (1, 2)), ("bias", (1,)))),
        gradients=("bias", "weight"),
        operators=("aten::mm.out",),
        program_bytes=0,
        program_sha256="",
    )
    return structs.replace(header, **changes)


FILE = encode_program(a_header(), PROGRAM)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "sums.program"
    path.write_bytes(FILE)
    found = read_program(path)
    assert found.program == PROGRAM
    assert found.name == module_hash(FILE)
    expected = a_header(program_bytes=200, program_sha256=found.header.program_sha256)
    assert found.header == expected
    assert is_program(path)


def test_another_file_is_no_program(tmp_path: Path) -> None:
    path = tmp_path / "task.py"
    path.write_text("task = Task()")
    assert not is_program(path)
    with pytest.raises(OperatorError, match=r"task\.py: not a program file"):
        read_program(path)
    with pytest.raises(OperatorError, match="cannot read program file"):
        read_program(tmp_path / "nowhere")


def test_every_truncation_is_refused() -> None:
    for length in range(len(FILE)):
        with pytest.raises(OperatorError):
            decode_program(FILE[:length])
    with pytest.raises(OperatorError, match="has 201 bytes, its header says 200"):
        decode_program(FILE + b"x")


def test_thousands_of_mutations_are_refused_or_are_another_file() -> None:
    rng, refused = Random(3), 0
    for _ in range(3000):
        data = bytearray(FILE)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            found = decode_program(bytes(data))
        except OperatorError:
            refused += 1
        else:
            assert found.program == PROGRAM
            assert found.name == module_hash(bytes(data)) != module_hash(FILE) or data == FILE
    assert refused > 2000


def test_a_changed_program_is_refused() -> None:
    with pytest.raises(OperatorError, match="does not have the digest"):
        decode_program(FILE[:-1] + b"x")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"gradients": ("bias",)}, "gradients"),
        ({"gradients": ("bias", "bias", "weight")}, "gradients"),
        ({"gradients": ("bias", "other")}, "gradients"),
        ({"terms": TaskTerms(False, 4, 100, 50, None, None)}, "has 3 parameters, .* say 4"),
        ({"client": ClientSGD(rate=0.1)}, "trains on 1500 examples, the terms say 100"),
        ({"executorch": "9.9"}, "ExecuTorch 9.9, this device has"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(OperatorError, match=problem):
        decode_program(encode_program(a_header(**changes), PROGRAM))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"rate":0.1', b'"rate":-1.0'),  # a value that cannot work
        (b'"rate":0.1', b'"rate":1e-1'),  # not canonical
        (b'"task":"sums"', b'"task":"sums","extra":1'),
        (b'"type":"numbers"', b'"type":"pickle"'),
        (b'"count":2', b'"count":0'),
        (b'"weight",[1,2]', b'"weight",[1,-2]'),
    ],
)
def test_an_invalid_header_is_refused(old: bytes, new: bytes) -> None:
    text = FILE[START:-200]
    assert old in text
    text = text.replace(old, new)
    data = FILE[:16] + len(text).to_bytes(8, "little") + text + PROGRAM
    with pytest.raises(OperatorError, match=r"header"):
        decode_program(data)


def test_the_format_does_not_change_unnoticed() -> None:
    """Devices name a program by its hash: a change of these bytes needs another magic number."""
    document = msgspec.json.decode(FILE[START:-200])
    assert FILE[:16] == b"papaya-program-1"
    assert list(document) == [
        *("task", "source", "executorch", "terms", "examples", "fields", "client", "manifest"),
        *("gradients", "operators", "program_bytes", "program_sha256"),
    ]
    assert document["fields"][0] == {
        "type": "numbers",
        "count": 2,
        "start": 0,
        "kind": "float32",
        "separator": ",",
    }
