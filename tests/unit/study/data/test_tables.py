"""Tables as data: every kind of table gives the same examples, and partitions share them out."""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from msgspec import structs

from papaya.errors import ConfigError, OperatorError
from papaya.learning.task import load_task
from papaya.study.data.opening import open_source, parse_partition, read_source, save_source
from papaya.study.data.partition import ByColumn, Dirichlet, LabelShards, Partition, Sizes
from papaya.study.data.source import Memory
from papaya.study.data.tables import table_source

ROWS = 600
LABELS = 5


def a_frame() -> Any:
    rng = np.random.default_rng(1)
    return pandas.DataFrame(
        {
            "user": [f"u{i % 7}" for i in range(ROWS)],
            "x": rng.normal(size=ROWS).round(3),
            "y": rng.integers(0, LABELS, ROWS),
        }
    )


def everything(source: Memory) -> list[list[dict[str, Any]]]:
    return [[json.loads(e) for e in examples] for _, examples in source.clients()]


def labels_of(source: Memory) -> list[Counter[int]]:
    return [Counter(row["y"] for row in rows) for rows in everything(source)]


def test_each_value_of_a_column_is_a_client() -> None:
    frame = a_frame()
    source = table_source(frame, ByColumn("user"))
    assert source.names == [f"u{i}" for i in range(7)]
    own = frame[frame.user == "u3"]
    expected = [{"x": x, "y": y} for x, y in zip(own.x, own.y, strict=True)]
    assert everything(source)[3] == expected


def test_rows_without_a_client_are_not_one_client(tmp_path: Path) -> None:
    frame = a_frame()
    frame.loc[[4, 9], "user"] = None
    problem = "2 rows have no value in the column 'user'; the first is "
    with pytest.raises(OperatorError, match=f"{problem}row 4, counted from 0"):
        table_source(frame, ByColumn("user"))
    frame.to_csv(tmp_path / "data.csv", index=False)
    with pytest.raises(OperatorError, match=f"{problem}line 6\n"):  # after that of the names
        open_source(
            f"csv:{tmp_path / 'data.csv'}", load_task(Path("examples/leaf.py")), ByColumn("user")
        )
    with pytest.raises(OperatorError, match="1 row has no value"):
        table_source([{"x": 1.0, "user": "a"}, {"x": 2.0}], ByColumn("user"))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"id": 1}, r"dict \{'id': 1\}"),
        ([1, 2], r"list \[1, 2\]"),
        (np.array([1, 2]), r"ndarray \[1 2\]"),
        (([1], 2), r"tuple \(\[1\], 2\)"),
    ],
)
def test_structs_and_lists_are_neither_clients_nor_labels(value: object, shown: str) -> None:
    frame = pandas.DataFrame({"x": [0.5, 1.5], "who": ["a", value]})
    for partition in (ByColumn("who"), Dirichlet(clients=1, label="who")):
        with pytest.raises(OperatorError, match=f"row 1, .* {shown} in the column 'who'") as found:
            table_source(frame, partition)
        assert found.value.hint == "use a column of numbers or texts"


def test_a_number_and_the_same_text_are_not_two_clients_of_one_name() -> None:
    frame = pandas.DataFrame({"x": [0.5, 1.5, 2.5], "user": [1, "1", 2]})
    with pytest.raises(OperatorError, match="column 'user' contains 1 as int and as str") as found:
        table_source(frame, ByColumn("user"))
    assert found.value.hint.startswith("convert the column to one type")


def test_all_kinds_of_tables_give_the_same_examples(tmp_path: Path) -> None:
    frame = a_frame()
    frame.to_csv(tmp_path / "data.csv", index=False)
    frame.to_parquet(tmp_path / "data.parquet")
    task = load_task(Path("examples/leaf.py"))
    wanted = table_source(frame, ByColumn("user"))
    by = ByColumn("user")
    for data in (f"csv:{tmp_path / 'data.csv'}", f"parquet:{tmp_path / 'data.parquet'}"):
        assert open_source(data, task, by).digest == wanted.digest
    items = frame.to_dict("records")  # a map-style dataset of torch: __len__ and __getitem__
    assert table_source(items, by).digest == wanted.digest
    save_source(wanted, tmp_path / "clients")
    read = open_source(f"saved:{tmp_path / 'clients'}", task)
    assert (read.digest, read.names) == (wanted.digest, wanted.names)


def test_hugging_face_datasets_give_the_same_examples(tmp_path: Path) -> None:
    import datasets  # slow

    datasets.disable_progress_bars()
    frame = a_frame()
    dataset = datasets.Dataset.from_dict({name: frame[name].tolist() for name in frame})
    wanted = table_source(frame, ByColumn("user"))
    assert table_source(dataset, ByColumn("user")).digest == wanted.digest
    datasets.DatasetDict(train=dataset).save_to_disk(tmp_path)
    task = load_task(Path("examples/leaf.py"))
    found = open_source(f"hf:{tmp_path}#train", task, ByColumn("user"))
    assert found.digest == wanted.digest
    with pytest.raises(OperatorError, match="several parts: train"):
        open_source(f"hf:{tmp_path}", task, ByColumn("user"))


def test_pairs_of_a_torch_dataset_have_x_and_y() -> None:
    import torch
    from torch.utils.data import TensorDataset

    x, y = torch.arange(40.0).reshape(20, 2) / 3, torch.arange(20) % 2
    source = table_source(TensorDataset(x, y), Sizes(clients=1))
    rows = everything(source)[0]
    assert torch.equal(torch.tensor([row["x"] for row in rows]), x), "float32 survives"
    assert [row["y"] for row in rows] == y.tolist()


@pytest.mark.parametrize(
    "partition",
    [
        Dirichlet(clients=20, alpha=0.3),
        LabelShards(clients=20),
        Sizes(clients=20),
        Sizes(clients=20, distribution="zipf", spread=1.0),
        Sizes(clients=20, distribution="equal"),
    ],
)
def test_a_partition_gives_each_row_to_one_client(partition: Partition) -> None:
    frame = a_frame()
    source = table_source(frame, partition)
    found = Counter(json.dumps(row) for rows in everything(source) for row in rows)
    assert found == Counter(json.dumps(row) for row in frame.to_dict("records"))
    assert table_source(frame, partition).digest == source.digest
    other = structs.replace(partition, seed=1)
    assert table_source(frame, other).digest != source.digest


def test_label_skew_follows_alpha_and_shards() -> None:
    frame = a_frame()

    def of_two_labels(source: Memory) -> float:
        """The share of its two most frequent labels in a client, in the mean."""
        counts = labels_of(source)
        shares = [sum(n for _, n in c.most_common(2)) / sum(c.values()) for c in counts]
        return float(np.mean(shares))

    even = of_two_labels(table_source(frame, Dirichlet(clients=10, alpha=1000)))
    skewed = of_two_labels(table_source(frame, Dirichlet(clients=10, alpha=0.05)))
    assert even < 0.6 < 0.85 < skewed
    shards = labels_of(table_source(frame, LabelShards(clients=10, per_client=1)))
    assert max(len(counts) for counts in shards) <= 2, "a shard has one label, or a border"


def test_sizes_follow_their_distribution() -> None:
    frame = a_frame()

    def sizes(**settings: Any) -> list[int]:
        source = table_source(frame, Sizes(clients=10, **settings))
        return [len(examples) for _, examples in source.clients()]

    assert sizes(distribution="equal") == [60] * 10
    ranked = sizes(distribution="zipf", spread=1.0)
    assert ranked[0] / ranked[4] == pytest.approx(5, rel=0.1)
    assert max(sizes(spread=2.0)) > 3 * max(sizes(spread=0.3))


def test_words_name_partitions() -> None:
    assert parse_partition("column:user") == ByColumn("user")
    assert parse_partition("dirichlet:clients=9,alpha=0.1") == Dirichlet(clients=9, alpha=0.1)
    assert parse_partition("sizes:clients=9,distribution=zipf,spread=1") == Sizes(
        clients=9, distribution="zipf", spread=1.0
    )
    for text in ("dirichlet", "random:clients=3", "shards:9", "sizes:clients=9,distribution=flat"):
        with pytest.raises(OperatorError, match="partition"):
            parse_partition(text)
    with pytest.raises(ConfigError, match="alpha"):
        parse_partition("dirichlet:clients=9,alpha=-1")


LOSSY = {
    "bytes is not a number or a text": b"abc",
    "bytearray is not a number": [{"raw": bytearray(2)}],
    "the Decimal 1.50 is not a JSON number": [Decimal("1.50")],
    "'utf-8' codec can't encode .* surrogates": "half of a pair: \ud800",
    "the float nan is not finite": [[1.0, float("nan")]],
    "the float inf is not finite": np.array([1.0, np.inf]),
    "the float -inf is not finite": float("-inf"),
}


@pytest.mark.parametrize("problem", LOSSY)
def test_values_that_json_would_change_are_refused(problem: str) -> None:
    rows = {"user": ["a", "a"], "z": ["text", None], "x": [[1.5, None], LOSSY[problem]]}
    with pytest.raises(OperatorError, match=f"row 1 of .*: column 'x': {problem}") as refused:
        table_source(pandas.DataFrame(rows), ByColumn("user"))
    assert "or leave the column out" in refused.value.hint
    items = [{"user": "a", "x": 1.0}, {"user": "a", "x": [LOSSY[problem]]}]
    with pytest.raises(OperatorError, match=f"row 1 of a dataset .*: column 'x': {problem}"):
        table_source(items, ByColumn("user"))


def test_bytes_in_files_are_refused(tmp_path: Path) -> None:
    import datasets  # slow

    datasets.disable_progress_bars()
    frame = pandas.DataFrame({"user": ["a"], "x": [b"abc"]})
    frame.to_parquet(tmp_path / "data.parquet")
    datasets.Dataset.from_pandas(frame).save_to_disk(tmp_path / "folder")
    task = load_task(Path("examples/leaf.py"))
    for data in (f"parquet:{tmp_path / 'data.parquet'}", f"hf:{tmp_path / 'folder'}"):
        with pytest.raises(OperatorError, match="column 'x': bytes is not"):
            open_source(data, task, ByColumn("user"))


def test_a_field_that_is_nan_is_missing() -> None:
    rows = {"user": ["a", "a"], "x": [0.5, float("nan")]}
    frame = pandas.DataFrame(rows)
    for table in (frame, frame.to_dict("records")):
        assert everything(table_source(table, ByColumn("user"))) == [[{"x": 0.5}, {"x": None}]]


def test_images_of_a_torch_dataset_need_a_transform() -> None:
    class Image:
        pass

    for value, kind in ((Image(), "Image"), (b"abc", "bytes")):
        problem = f"row 1 of a dataset .*: column 'x': {kind} is not a number"
        for item in ((value, 1), {"x": value, "y": 1}):
            with pytest.raises(OperatorError, match=problem) as refused:
                table_source([([0.5], 0), item], Sizes(clients=1))
            assert "ToTensor()" in refused.value.hint


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    frame, task = a_frame(), load_task(Path("examples/leaf.py"))
    with pytest.raises(OperatorError, match=r"no column 'users'") as caught:
        table_source(frame, ByColumn("users"))
    assert "user, x, y" in caught.value.hint
    with pytest.raises(OperatorError, match="600 rows for 601 clients"):
        table_source(frame, Sizes(clients=601))
    with pytest.raises(OperatorError, match="600 rows for 800 shards"):
        table_source(frame, LabelShards(clients=400))
    with pytest.raises(OperatorError, match="no rows"):
        table_source(frame[:0], ByColumn("user"))
    with pytest.raises(OperatorError, match=r"row 0 of a DataFrame cannot be written.*'x': obj"):
        table_source(pandas.DataFrame({"user": ["a"], "x": [object()]}), ByColumn("user"))
    with pytest.raises(OperatorError, match="which row belongs to which client"):
        open_source("csv:data.csv", task)
    with pytest.raises(OperatorError, match="has its own clients"):
        open_source("stdlib", task, ByColumn("user"))
    (tmp_path / "rows.csv").touch()
    for data, meant in (("cvs:rows.csv", "csv:rows.csv"), (f"{tmp_path}/rows.csv", "csv:/")):
        with pytest.raises(OperatorError, match=f"unknown data source: '{data}'") as refused:
            open_source(data, task, ByColumn("user"))
        assert refused.value.hint.startswith(f"did you mean {meant}")
    with pytest.raises(OperatorError, match=r"cannot read .*nothing\.csv"):
        open_source(f"csv:{tmp_path / 'nothing.csv'}", task, ByColumn("user"))
    (tmp_path / "clients").write_bytes(b"other")
    with pytest.raises(OperatorError, match="not a file of saved clients"):
        read_source(tmp_path / "clients")
