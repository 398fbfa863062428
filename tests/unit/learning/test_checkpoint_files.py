"""Models by tensor names: the safetensors library reads ours, we read its, and nothing else."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from papaya.errors import OperatorError
from papaya.learning.checkpoint_files import decode_named, encode_named, read_checkpoint, save_named
from papaya.learning.parameters import Manifest, encode

MANIFEST = Manifest((("weight", (2, 3)), ("bias", (2,)), ("scale", ()), ("empty", (0, 4))))
VECTOR = np.arange(9, dtype=np.float32)


def test_the_safetensors_library_reads_what_we_write(tmp_path: Path) -> None:
    save_named(tmp_path / "m.safetensors", MANIFEST, VECTOR, {"version": "3"})
    with safetensors.safe_open(tmp_path / "m.safetensors", "np") as file:
        assert file.metadata() == {"version": "3"}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert Manifest.of({name: tensors[name] for name, _ in MANIFEST.tensors}) == MANIFEST
    assert MANIFEST.flatten(tensors).tobytes() == VECTOR.tobytes()
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


@given(st.permutations([name for name, _ in MANIFEST.tensors]))
def test_we_read_what_the_library_writes_in_any_order(names: list[str]) -> None:
    tensors = MANIFEST.unflatten(VECTOR)
    data = safetensors.numpy.save({name: tensors[name] for name in names}, {"made": "elsewhere"})
    assert decode_named(data, MANIFEST).tobytes() == VECTOR.tobytes()


def test_a_parameters_file_of_ours_is_a_checkpoint_too(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(encode(VECTOR, {"version": "1"}))
    assert read_checkpoint(tmp_path / "blob", MANIFEST).tobytes() == VECTOR.tobytes()
    other = Manifest((("w", (10,)),))
    with pytest.raises(OperatorError, match="another model"):
        read_checkpoint(tmp_path / "blob", other)


def test_a_model_may_name_a_tensor_as_our_own_files_do() -> None:
    manifest = Manifest((("parameters", (3, 3)),))
    data = safetensors.numpy.save({"parameters": VECTOR.reshape(3, 3)})
    assert decode_named(data, manifest).tobytes() == VECTOR.tobytes()


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "m.pt").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(OperatorError, match="not a safetensors file") as raised:
        read_checkpoint(tmp_path / "m.pt", MANIFEST)
    assert "pickles are never read" in raised.value.hint
    assert not (tmp_path / "ran").exists()


def with_header(change: Callable[[dict[str, Any]], None]) -> bytes:
    data = encode_named(MANIFEST, VECTOR)
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def offsets(name: str, start: int, end: int) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(data_offsets=[start, end])


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "not a safetensors file"),
        (b"\xff" * 64, "not a safetensors file"),
        (encode_named(MANIFEST, VECTOR)[:-1], "not fully covered"),
        (encode_named(MANIFEST, VECTOR) + b"x", "not fully covered"),
        (with_header(lambda h: h.update(bias=1)), "invalid JSON"),
        (with_header(lambda h: h.update(__metadata__={"a": 1})), "invalid JSON"),
        (with_header(lambda h: h["bias"].pop("dtype")), "missing field"),
        (with_header(lambda h: h["bias"].update(dtype="F16", shape=[4])), "F16"),
        (with_header(lambda h: h["bias"].update(shape=[3])), "invalid shape"),
        (with_header(lambda h: h["bias"].update(shape=[-1, -2])), "invalid value"),
        (with_header(offsets("bias", 0, 8)), "invalid offset"),
        (with_header(offsets("bias", 28, 36)), "invalid offset"),
        (with_header(offsets("bias", 32, 24)), "invalid offset"),
        (with_header(lambda h: h["bias"].update(shape=[2, 1])), "has shape"),
        (with_header(lambda h: h.update(other=h.pop("bias"))), "lacks"),
        (safetensors.numpy.save({"extra": VECTOR}), "lacks"),
        (
            safetensors.numpy.save({**MANIFEST.unflatten(VECTOR), "extra": VECTOR}),
            "does not know",
        ),
        (encode_named(MANIFEST, VECTOR)[:-4] + b"\x00\x00\xc0\x7f", "NaN"),
        ((10).to_bytes(8, "little") + b"[" * 10, "invalid"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(OperatorError, match=complaint) as raised:
        decode_named(data, MANIFEST)
    assert raised.value.hint


@given(st.binary(max_size=200))
def test_garbage_raises_nothing_else(data: bytes) -> None:
    body = len(data).to_bytes(8, "little") + data
    for candidate in (data, body):
        with pytest.raises(OperatorError):
            decode_named(candidate, MANIFEST)


def test_a_place_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "m.safetensors"
    with pytest.raises(OperatorError, match="No such file"):
        read_checkpoint(missing, MANIFEST)
    with pytest.raises(OperatorError, match="cannot write"):
        save_named(missing, MANIFEST, VECTOR)
