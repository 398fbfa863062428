"""Manifests and parameter files: exact round trips, one encoding, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from papaya.errors import OperatorError, ProtocolError
from papaya.learning.parameters import (
    BLOCK,
    Manifest,
    Tensor,
    Vector,
    blocks,
    decode,
    decode_tensors,
    encode,
    encode_tensors,
    is_finite,
)

MANIFEST = Manifest((("weight", (2, 3)), ("bias", (2,)), ("scale", ())))

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = st.lists(finite, min_size=1, max_size=20).map(lambda x: np.array(x, np.float32))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
metadata = st.dictionaries(texts, texts, max_size=4)


def a_model() -> dict[str, npt.NDArray[np.float32]]:
    return {
        "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "bias": np.array([6, 7], np.float32),
        "scale": np.array(8, np.float32),
    }


def test_the_vector_is_in_manifest_order_whatever_the_order_of_the_tensors() -> None:
    model = a_model()
    backwards = dict(reversed(model.items()))
    assert MANIFEST.length == 9
    assert MANIFEST.flatten(model).tolist() == list(range(9))
    assert MANIFEST.flatten(backwards).tolist() == list(range(9))
    assert MANIFEST.flatten(model).dtype == np.dtype("<f4")
    assert Manifest.of(model) == MANIFEST


def test_flatten_copies_and_unflatten_does_not() -> None:
    model = {"only": np.zeros(3, np.float32)}
    manifest = Manifest.of(model)
    vector = manifest.flatten(model)
    assert not np.shares_memory(vector, model["only"])
    assert np.shares_memory(vector, manifest.unflatten(vector)["only"])


@given(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5))
def test_flatten_and_unflatten_are_inverse(shapes: list[tuple[int, ...]]) -> None:
    manifest = Manifest((("at least one", (1,)), *((f"t{i}", s) for i, s in enumerate(shapes))))
    vector = np.arange(manifest.length, dtype=np.float32)
    model = manifest.unflatten(vector)
    assert Manifest.of(model) == manifest
    assert manifest.flatten(model).tobytes() == vector.tobytes()


def test_a_tensor_that_is_not_contiguous_is_flattened_in_its_own_order() -> None:
    transposed = np.arange(6, dtype=np.float32).reshape(2, 3).T
    manifest = Manifest.of({"t": transposed})
    assert manifest.flatten({"t": transposed}).tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bias": None}, "lacks ['bias']"),
        ({"extra": np.zeros(1, np.float32)}, "does not know ['extra']"),
        ({"bias": np.zeros(3, np.float32)}, "'bias' has shape (3,), the manifest says (2,)"),
        ({"bias": np.zeros((2, 1), np.float32)}, "'bias' has shape (2, 1)"),
        ({"bias": np.zeros(2, np.float64)}, "'bias' is float64"),
        ({"bias": np.zeros(2, np.int32)}, "'bias' is int32"),
        ({"bias": np.zeros(2, ">f4")}, "'bias' is >f4"),
        ({"bias": np.array([0, np.nan], np.float32)}, "'bias' contains NaN"),
        ({"scale": np.array(-np.inf, np.float32)}, "'scale' contains NaN or infinity"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_by_name(
    change: dict[str, npt.NDArray[np.float32] | None], says: str
) -> None:
    model = {name: t for name, t in {**a_model(), **change}.items() if t is not None}
    with pytest.raises(OperatorError) as refusal:
        MANIFEST.flatten(model)
    assert says in str(refusal.value)
    assert refusal.value.hint


@pytest.mark.parametrize("length", [0, 8, 10])
def test_unflatten_refuses_a_vector_of_another_length(length: int) -> None:
    with pytest.raises(OperatorError, match="shape"):
        MANIFEST.unflatten(np.zeros(length, np.float32))


@pytest.mark.parametrize(
    "tensors",
    [
        (),
        (("a", (0,)),),
        (("a", (1,)), ("a", (1,))),
        (("a", (-1, -1)),),
        (("", (1,)),),
    ],
)
def test_a_manifest_of_nonsense_cannot_be_made_or_parsed(
    tensors: tuple[tuple[str, tuple[int, ...]], ...],
) -> None:
    with pytest.raises(ValueError, match=r"model|tensor"):
        Manifest(tensors)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps({"tensors": tensors}), type=Manifest)


def test_a_manifest_survives_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(MANIFEST), type=Manifest) == MANIFEST


@pytest.mark.parametrize("length", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_blocks_cover_a_vector_once(length: int) -> None:
    covered = [i for block in blocks(length) for i in range(block.start, block.stop)]
    assert covered == list(range(length))


@pytest.mark.parametrize("where", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 2])
@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
def test_is_finite_looks_at_every_block(where: int, what: float) -> None:
    vector = np.full(2 * BLOCK + 3, 3e38, np.float32)
    assert is_finite(vector)
    vector[where] = what
    assert not is_finite(vector)


@given(vectors, metadata)
def test_encode_and_decode_are_inverse(vector: Vector, about: dict[str, str]) -> None:
    data = encode(vector, about)
    assert decode(data, vector.size).tobytes() == vector.tobytes()
    assert decode_tensors(data, ["parameters"], vector.size)[1] == about


@given(vectors, metadata)
def test_the_order_of_the_metadata_does_not_matter(vector: Vector, about: dict[str, str]) -> None:
    assert encode(vector, about) == encode(vector, dict(reversed(about.items())))


@given(vectors, texts, texts)
def test_with_one_entry_of_metadata_the_bytes_are_those_of_the_library(
    vector: Vector, key: str, value: str
) -> None:
    """With more the library has no one encoding: it writes metadata in a random order."""
    library = safetensors.numpy.save({"parameters": vector}, {key: value})
    assert encode(vector, {key: value}) == library


def test_the_library_reads_our_files(tmp_path: Path) -> None:
    about = {"version": "3", "task": 'é\n"quoted"'}
    tensors = {"b": np.array([1, 2], np.float32), "a": np.array([3, 4], np.float32)}
    path = tmp_path / "file.safetensors"
    path.write_bytes(encode_tensors(tensors, about))
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata() == about
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {  # noqa: SIM118
            "a": [3, 4],
            "b": [1, 2],
        }


def test_the_encoding_never_changes() -> None:
    """Blobs are named by their hash: another encoding would orphan every stored version."""
    header = (
        b'{"__metadata__":{"task":"t","version":"1"},'
        b'"parameters":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    )
    header += b" " * (-len(header) % 8)
    expected = len(header).to_bytes(8, "little") + header + b"\0\0\x80?\0\0\0\xc0"
    vector = np.array([1, -2], np.float32)
    assert encode(vector, {"version": "1", "task": "t"}) == expected


def test_what_is_decoded_cannot_be_written_to() -> None:
    vector = decode(encode(np.zeros(3, np.float32), {}), 3)
    with pytest.raises(ValueError, match="read-only"):
        vector[0] = 1


@pytest.mark.parametrize(
    "vector",
    [
        np.zeros(2, np.float64),
        np.zeros((2, 2), np.float32),
        np.array([np.nan], np.float32),
        np.array([np.inf], np.float32),
    ],
)
def test_nothing_is_encoded_that_decode_would_refuse(vector: Vector) -> None:
    with pytest.raises(OperatorError):
        encode(vector, {})


def test_encode_refuses_more_metadata_than_decode_reads() -> None:
    with pytest.raises(ValueError, match="header"):
        encode(np.zeros(1, np.float32), {"note": "x" * 70_000})


def test_a_header_that_is_too_long_is_not_even_parsed() -> None:
    text = b'{"__metadata__":{"note":"' + b"x" * 70_000 + b'"}}'
    with pytest.raises(ProtocolError, match="header of 70028"):
        decode(len(text).to_bytes(8, "little") + text, 0)


def test_the_order_of_the_tensors_does_not_matter() -> None:
    tensors = {"b": np.array([1, 2], np.float32), "a": np.array([3, 4], np.float32)}
    data = encode_tensors(tensors, {})
    assert data == encode_tensors(dict(reversed(tensors.items())), {})
    assert data == safetensors.numpy.save(tensors)
    found, _ = decode_tensors(data, ["b", "a"], 2)
    assert {name: array.tolist() for name, array in found.items()} == {"a": [3, 4], "b": [1, 2]}


def test_encode_tensors_refuses_a_mixture() -> None:
    one: Tensor = np.zeros(1, np.float32)
    others: list[Tensor] = [np.zeros(2, np.float32), np.zeros(1), np.zeros((1, 1), np.float32)]
    for other in others:
        with pytest.raises(ValueError, match="one length and dtype"):
            encode_tensors({"a": one, "b": other}, {})
    with pytest.raises(ValueError, match="one length and dtype"):
        encode_tensors({"a": np.zeros(1, np.float16)}, {})


def _relabelled(data: bytes, old: bytes, new: bytes) -> bytes:
    assert old in data
    assert len(old) == len(new)
    return data.replace(old, new)


GOOD = encode(np.array([1, 2, 3], np.float32), {"a": "x", "b": "y"})
LIBRARY = safetensors.numpy.save
THREE = np.array([1, 2, 3], np.float32)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(b"", id="empty"),
        pytest.param(GOOD[:7], id="truncated length"),
        pytest.param(GOOD[:40], id="truncated header"),
        pytest.param(GOOD[:-1], id="truncated data"),
        pytest.param(GOOD[:-4], id="one parameter less"),
        pytest.param(GOOD + b"\0", id="trailing byte"),
        pytest.param(GOOD + b"\0\0\0\0", id="trailing parameter"),
        pytest.param(b"\xff" * 8 + GOOD[8:], id="header longer than the file"),
        pytest.param(_relabelled(GOOD, b"F32", b"I32"), id="another dtype"),
        pytest.param(_relabelled(GOOD, b"[3]", b"[4]"), id="another shape"),
        pytest.param(_relabelled(GOOD, b"[0,12]", b"[4,16]"), id="other offsets"),
        pytest.param(_relabelled(GOOD, b"parameters", b"parametres"), id="another name"),
        pytest.param(_relabelled(GOOD, b'"a":"x","b":"y"', b'"b":"y","a":"x"'), id="unsorted"),
        pytest.param(_relabelled(GOOD, b'"a":"x","b":"y"', b'"a":"x","a":"y"'), id="twice"),
        pytest.param(_relabelled(GOOD, b'"a":"x"', b'"a":123'), id="metadata of numbers"),
        pytest.param(_relabelled(GOOD, b'"a":"x"', b'"a":"\xff"'), id="metadata not utf-8"),
        pytest.param(LIBRARY({"parameters": THREE.astype(np.float64)}), id="float64"),
        pytest.param(LIBRARY({"parameters": THREE.reshape(3, 1)}), id="two dimensions"),
        pytest.param(LIBRARY({"parameters": THREE, "more": THREE}), id="two tensors"),
        pytest.param(LIBRARY({"parameters": np.array([1, np.inf, 2], np.float32)}), id="infinite"),
        pytest.param(LIBRARY({"parameters": np.array([np.nan, 1, 2], np.float32)}), id="nan"),
        pytest.param((60_000).to_bytes(8, "little") + b'{"x":' + b"[" * 60_000, id="deep"),
    ],
)
def test_any_other_file_is_refused(bad: bytes) -> None:
    assert decode(GOOD, 3).tolist() == [1, 2, 3]
    with pytest.raises(ProtocolError):
        decode(bad, 3)


def test_a_file_of_another_length_is_refused() -> None:
    for length in (0, 2, 4):
        with pytest.raises(ProtocolError, match=f"with {length} x F32"):
            decode(GOOD, length)


@given(st.binary(max_size=200), st.integers(0, 8))
def test_arbitrary_bytes_raise_protocol_error_and_nothing_else(data: bytes, length: int) -> None:
    with pytest.raises(ProtocolError):
        decode(data, length)


@given(st.binary(max_size=100), st.integers(0, 8))
def test_arbitrary_headers_raise_protocol_error_and_nothing_else(text: bytes, length: int) -> None:
    data = len(text).to_bytes(8, "little") + text + bytes(4 * length)
    with pytest.raises(ProtocolError):
        decode(data, length)


@given(vectors, metadata, st.data())
def test_a_mutated_file_is_refused_or_is_another_canonical_file(
    vector: Vector, about: dict[str, str], data: st.DataObject
) -> None:
    good = encode(vector, about)
    start = data.draw(st.integers(0, len(good)))
    end = data.draw(st.integers(start, min(len(good), start + 4)))
    mutated = good[:start] + data.draw(st.binary(max_size=4)) + good[end:]
    try:
        tensors, found = decode_tensors(mutated, ["parameters"], vector.size)
    except ProtocolError:
        assert mutated != good
    else:
        assert encode(tensors["parameters"], found) == mutated
