"""CSV files: the types of columns, what is refused, and agreement with pandas."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from papaya.errors import OperatorError
from papaya.study.data.csv_file import csv_columns


def columns_of(folder: Path, text: str) -> dict[str, list[Any]]:
    path = folder / "table.csv"
    path.write_text(text, encoding="utf-8", newline="")
    return csv_columns(path)[0]


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["1", "-2", "007"], [1, -2, 7]),
        (["1", "", "NA"], [1, None, None]),
        (["1", "2.0"], [1.0, 2.0]),
        (["0.1", "1e-3", ".5", "4."], [0.1, 1e-3, 0.5, 4.0]),
        (["true", "FALSE", ""], [True, False, None]),
        (["true", "1"], ["true", "1"]),
        (["1_000", "2"], ["1_000", "2"]),
        (["12", "two"], ["12", "two"]),
        (["9223372036854775807"], [2**63 - 1]),
        (["9223372036854775808", "1"], ["9223372036854775808", "1"]),
        (["9" * 5000, "1"], ["9" * 5000, "1"]),
        (["", ""], [None, None]),
    ],
)
def test_a_column_has_one_type(tmp_path: Path, texts: list[str], values: list[Any]) -> None:
    found = columns_of(tmp_path, "x,last\n" + "".join(f"{text},a\n" for text in texts))["x"]
    assert [(type(v), v) for v in found] == [(type(v), v) for v in values]


def test_quotes_line_breaks_and_blank_lines(tmp_path: Path) -> None:
    found = columns_of(tmp_path, '\ufeffname,text\r\na,"one, ""two""\nthree"\r\n\r\nb,é\r\n')
    assert found == {"name": ["a", "b"], "text": ['one, "two"\nthree', "é"]}


def test_a_compressed_file(tmp_path: Path) -> None:
    (tmp_path / "table.csv.gz").write_bytes(gzip.compress(b"x\n1\n2\n"))
    assert csv_columns(tmp_path / "table.csv.gz")[0] == {"x": [1, 2]}


@pytest.mark.parametrize("damage", [lambda whole: whole[:-12], lambda whole: whole[:10] + b"~~~~"])
def test_a_damaged_compressed_file_is_refused(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    (tmp_path / "table.csv.gz").write_bytes(damage(gzip.compress(b"x\n1\n2\n")))
    with pytest.raises(ValueError, match="the compressed file is damaged"):
        csv_columns(tmp_path / "table.csv.gz")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,b\n1,2\n3\n", "line 3 has 1 values for 2 columns"),
        ("a,b\n1,2,3\n", "line 2 has 3 values for 2 columns"),
        ("a,a\n1,2\n", "2 columns have the name 'a'"),
        ('a\n"open\n', "line 2: unexpected end of data"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        columns_of(tmp_path, text)


def test_a_value_that_would_turn_numbers_into_texts_is_named(tmp_path: Path) -> None:
    numbers = "".join(f'u{n},"a\nb",{n / 2}\n' for n in range(10))
    with pytest.raises(OperatorError) as caught:
        columns_of(tmp_path, f'user,text,x\n{numbers}u10,,\nu11,,"12,5"\n')
    where = f"{tmp_path / 'table.csv'}, line 23"
    assert str(caught.value) == f"{where}: the column 'x' has numbers, but here '12,5'"
    assert "leave it empty if it is unknown" in caught.value.hint
    assert "parquet:FILE" in caught.value.hint, "the command line has a way out, too"
    mixed = f"user,text,x\n{numbers}u1,,one\nu2,,two\n"
    assert columns_of(tmp_path, mixed)["x"][-2:] == ["one", "two"], "too many for mistakes"
    path = tmp_path / "table.csv"
    path.write_text("user\n" + "".join(f"{n}\n" for n in range(10)) + "admin\n")
    assert csv_columns(path, ("user",))[0]["user"][-2:] == ["9", "admin"]


def test_names_of_clients_are_texts(tmp_path: Path) -> None:
    """007 and 7 are two clients, not one."""
    path = tmp_path / "data.csv"
    path.write_text("user,x\n007,007\n7,7\n 7,7\n1e3,1\n1000,2\n,3\n")
    found, _ = csv_columns(path, ["user"])
    assert found == {
        "user": ["007", "7", "7", "1e3", "1000", None],
        "x": [7, 7, 7, 1, 2, 3],
    }


def test_a_file_without_rows_has_columns(tmp_path: Path) -> None:
    assert columns_of(tmp_path, "a,b\n") == {"a": [], "b": []}
    assert columns_of(tmp_path, "") == {}


COLUMNS = st.one_of(
    st.lists(st.integers(-(2**63) + 1, 2**63 - 1), min_size=4, max_size=4),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=4, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.lists(st.text("abc ,\"'\n", min_size=1), min_size=4, max_size=4),
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(COLUMNS, COLUMNS)
def test_a_table_that_pandas_writes_comes_back(
    tmp_path: Path, first: list[Any], second: list[Any]
) -> None:
    pandas.DataFrame({"a": first, "b": second}).to_csv(tmp_path / "table.csv", index=False)
    found, _ = csv_columns(tmp_path / "table.csv")
    for given_values, values in ((first, found["a"]), (second, found["b"])):
        assert [type(v) for v in values] == [type(v) for v in given_values]
        assert values == given_values
