"""Reading a log: proven entries only, a memory that survives, and HTTP as one more way to fetch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from papaya.verifiable_log.errors import LogError, MissingFile
from papaya.verifiable_log.over_http import over_http
from papaya.verifiable_log.reader import LogReader
from tests.unit.verifiable_log.builders import KEY, NOW, POLICY, Served, a_log, a_reader
from tests.unit.verifiable_log.hosts import serving

ENTRIES = [b"entry %d" % i for i in range(300)]


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with serving(tmp_path) as address:
        yield address


def test_any_http_server_can_serve_a_log(tmp_path: Path, address: str) -> None:
    log = a_log(tmp_path / "log", ENTRIES)
    reader = LogReader(over_http(f"{address}/log/"), POLICY)
    assert reader.refresh(NOW).size == 300
    assert reader.entry(299) == ENTRIES[299]
    log.append([b"one more"], KEY)
    reader.refresh(NOW)
    assert reader.entries() == [*ENTRIES, b"one more"]


def test_what_is_not_served_is_missing(address: str) -> None:
    with pytest.raises(MissingFile, match="does not exist"):
        over_http(address)("checkpoint")


def test_a_server_that_is_away_is_said_to_be(address: str) -> None:
    with pytest.raises(LogError, match="cannot read"):
        over_http("http://127.0.0.1:1")("checkpoint")


def test_a_reader_remembers_over_restarts(tmp_path: Path) -> None:
    log = a_log(tmp_path, ENTRIES[:3])
    reader = a_reader(log)
    reader.refresh(NOW)
    log.append(ENTRIES[3:], KEY)
    again = a_reader(log, reader.remembered)
    assert again.checkpoint.size == 3
    assert again.refresh(NOW).size == 300
    assert again.remembered == log.fetch("checkpoint")


def test_nothing_is_known_before_the_first_checkpoint(tmp_path: Path) -> None:
    reader = a_reader(a_log(tmp_path, ENTRIES[:3]))
    assert reader.remembered is None
    with pytest.raises(LogError, match="no checkpoint"):
        reader.entry(0)


@pytest.mark.parametrize("index", [-1, 3, 1000])
def test_there_are_no_entries_beyond_the_checkpoint(tmp_path: Path, index: int) -> None:
    reader = a_reader(a_log(tmp_path, ENTRIES[:3]))
    reader.refresh(NOW)
    with pytest.raises(LogError, match="there is no entry"):
        reader.entry(index)


def test_a_log_may_drop_partial_tiles_once_full_ones_are_there(tmp_path: Path) -> None:
    log = a_log(tmp_path, ENTRIES[:200])
    served = Served(log)
    reader = LogReader(served.fetch, POLICY)
    reader.refresh(NOW)
    log.append(ENTRIES[200:], KEY)
    served.removed = {"tile/0/000.p/200", "tile/entries/000.p/200"}
    assert reader.entry(7) == ENTRIES[7]
    assert reader.refresh(NOW).size == 300


def test_a_proof_takes_few_files(tmp_path: Path) -> None:
    served = Served(a_log(tmp_path, ENTRIES))
    reader = LogReader(served.fetch, POLICY)
    reader.refresh(NOW)
    reader.entry(0)
    assert served.fetched == ["checkpoint", "tile/entries/000", "tile/0/000", "tile/0/001.p/44"]


def test_an_empty_log_can_be_remembered(tmp_path: Path) -> None:
    log = a_log(tmp_path)
    reader = a_reader(log)
    assert reader.refresh(NOW).size == 0
    assert reader.entries() == []
    log.append(ENTRIES[:1], KEY)
    assert reader.refresh(NOW).size == 1
