"""LEAF's JSON: what it holds comes out as it is; anything of another shape is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from papaya.errors import OperatorError
from papaya.study.data.leaf import leaf_source


def a_file(path: Path, users: dict[str, list[tuple[Any, Any]]], /, **changes: Any) -> Path:
    content = {
        "users": list(users),
        "num_samples": [len(pairs) for pairs in users.values()],
        "user_data": {
            user: {"x": [x for x, _ in pairs], "y": [y for _, y in pairs]}
            for user, pairs in users.items()
        },
    }
    path.write_text(json.dumps(content | changes))
    return path


def some(count: int, first: int = 0) -> list[tuple[Any, Any]]:
    return [([0.1 * i, -1e-30, 2], i % 3) for i in range(first, first + count)]


def pairs_of(source: Any, client: int) -> list[tuple[Any, Any]]:
    examples = [json.loads(e) for e in source.training(client)]
    return [(example["x"], example["y"]) for example in examples]


def test_a_file_gives_its_users_and_their_pairs(tmp_path: Path) -> None:
    users = {"anna": some(30), "börk": some(20, first=100), "nobody": []}
    source = leaf_source(a_file(tmp_path / "data.json", users))
    assert len(source.volumes) == 2
    assert source.left_out == {"no_examples": 1}
    assert source.names == ["anna", "börk"]
    for client, user in enumerate(("anna", "börk")):
        held = [(json.loads(e)["x"], json.loads(e)["y"]) for e in source.held_out(client)]
        trained = pairs_of(source, client)
        assert trained == [pair for pair in users[user] if pair in trained]
        assert all(pair in users[user] and pair not in trained for pair in held)
        assert len(trained) > 10


def test_values_stand_as_in_the_file(tmp_path: Path) -> None:
    """Strings, nested lists and objects: LEAF's tasks have all of these."""
    text = '{"x": ["a\\u00e9b"],   "y": [{"count": [1, 2]}]}'
    content = '{"users": ["u"], "num_samples": [1], "user_data": {"u": ' + text + "}}"
    (tmp_path / "data.json").write_text(content)
    source = leaf_source(tmp_path / "data.json")
    assert source.training(0) == [b'{"x":"a\\u00e9b","y":{"count": [1, 2]}}']


def test_a_folder_is_all_its_files_in_order(tmp_path: Path) -> None:
    a_file(tmp_path / "all_1.json", {"b": some(20)})
    a_file(tmp_path / "all_0.json", {"a": some(40)}, hierarchies=["x"])
    (tmp_path / ".hidden.json").write_text("not JSON")
    (tmp_path / "notes.txt").write_text("not JSON")
    source = leaf_source(tmp_path)
    assert len(source.volumes) == 2
    assert source.volumes[0] > source.volumes[1]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"users": ["a"]}, r"1 users and 2 num_samples"),
        ({"num_samples": [5, 4]}, r"user 'b' has 5 x, 5 y and num_samples 4"),
        ({"users": ["a", "c"]}, r"user_data of 'b', who is not in users"),
        ({"users": ["a", "a"], "user_data": {"a": {"x": [1] * 5, "y": [1] * 5}}}, r"'a' is in .*"),
        ({"user_data": {"a": {"x": [1] * 5, "y": [1] * 5}}}, r"user 'b' has no user_data"),
        ({"user_data": {"a": {"x": [1] * 5}, "b": {}}}, r"missing required field"),
        ({"user_data": [1]}, r"Expected `object`"),
        ({"num_samples": ["5", "5"]}, r"Expected `int`"),
        ({"extra": 1}, r"unknown field `extra`"),
    ],
)
def test_another_shape_is_refused_with_file_and_place(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    path = a_file(tmp_path / "data.json", {"a": some(5), "b": some(5)}, **changes)
    with pytest.raises(OperatorError, match=rf"invalid LEAF file .*data\.json: .*{problem}") as e:
        leaf_source(path)
    assert '"user_data"' in e.value.hint


@pytest.mark.parametrize("content", [b"", b"[]", b'{"users": [', b"\xff\xfe", b"NaN", b"[" * 9999])
def test_what_is_no_json_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data.json").write_bytes(content)
    with pytest.raises(OperatorError, match="invalid LEAF file"):
        leaf_source(tmp_path / "data.json")


def test_a_user_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("one.json", "two.json"):
        a_file(tmp_path / name, {"anna": some(20)})
    with pytest.raises(OperatorError, match=r"two\.json: .*'anna' is in .*one\.json already"):
        leaf_source(tmp_path)


def test_what_is_not_there_is_told_with_a_way_on(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"cannot read .*gone\.json: No such file"):
        leaf_source(tmp_path / "gone.json")
    with pytest.raises(OperatorError, match=r"there is no \*\.json in"):
        leaf_source(tmp_path)
    (tmp_path / "train").mkdir()
    a_file(tmp_path / "train" / "all.json", {"anna": some(20)})
    with pytest.raises(OperatorError) as e:
        leaf_source(tmp_path)
    assert e.value.hint == f"leaf:{tmp_path / 'train'}"
