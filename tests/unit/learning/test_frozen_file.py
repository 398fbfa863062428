"""The file of frozen tensors: one encoding, mapped without a copy, refused if it is another."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import safetensors.numpy

from papaya.errors import OperatorError
from papaya.learning.checkpoint_files import read_frozen
from papaya.learning.frozen_file import FrozenTensor, decode_frozen, encode_frozen, map_frozen


def a_tensor(dtype: str, kind: str, shape: tuple[int, ...]) -> FrozenTensor:
    values = np.arange(int(np.prod(shape)), dtype=kind)
    return FrozenTensor(dtype, shape, values.view(np.uint8))


TENSORS = {
    "flags": a_tensor("U8", "u1", (3,)),
    "base.weight": a_tensor("F32", "<f4", (2, 3)),
    "base.half": a_tensor("F16", "<f2", (5,)),
    "places": a_tensor("I64", "<i8", (4,)),
}
ENCODED = encode_frozen(TENSORS)


def test_what_was_written_is_read_without_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "frozen"
    path.write_bytes(ENCODED)
    found = map_frozen(path)
    assert list(found) == ["places", "base.weight", "base.half", "flags"]
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == TENSORS[name][:2]
        assert tensor.data.tobytes() == TENSORS[name].data.tobytes()
        assert not tensor.data.flags.owndata
    places = [tensor.data.ctypes.data for tensor in found.values()]
    assert places[0] % 64 == 0
    assert [place % size for place, size in zip(places, (8, 4, 2, 1), strict=True)] == [0] * 4


def test_the_library_reads_it_and_its_files_are_read(tmp_path: Path) -> None:
    library = dict(safetensors.deserialize(ENCODED))  # type: ignore[no-untyped-call]
    assert library["base.weight"]["shape"] == [2, 3]
    path = tmp_path / "theirs"
    path.write_bytes(safetensors.numpy.save({"a": np.zeros(2, np.float32)}, {"k": "v"}))
    assert read_frozen(path)["a"].shape == (2,)


def test_a_missing_file_is_looked_for_beside_the_task_file(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"there is no file .*absent") as refused:
        read_frozen(tmp_path / "absent")
    assert "relative to the folder of that file" in refused.value.hint


def test_a_change_anywhere_in_the_header_or_the_length_is_refused() -> None:
    """The data themselves are covered by the hash in the manifest."""
    header = ENCODED.index(b"}}") + 2
    rng = Random(3)
    for place in range(header):
        changed = bytearray(ENCODED)
        changed[place] ^= 1 << rng.randrange(8)
        try:
            found = decode_frozen(np.frombuffer(bytes(changed), np.uint8))
        except OperatorError:
            continue
        assert encode_frozen(found) == bytes(changed)
    for length in (*range(0, len(ENCODED), 7), len(ENCODED) - 1):
        with pytest.raises(OperatorError, match="invalid file of frozen tensors"):
            decode_frozen(np.frombuffer(ENCODED[:length], np.uint8))
    with pytest.raises(OperatorError, match="the header says"):
        decode_frozen(np.frombuffer(ENCODED + b"x", np.uint8))


def test_a_type_that_devices_lack_is_refused() -> None:
    with pytest.raises(OperatorError, match="'x' is complex64"):
        encode_frozen({"x": FrozenTensor("complex64", (1,), np.zeros(8, np.uint8))})
