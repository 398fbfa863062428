"""Real text as data: what is a client, who holds it, and what a model of it is judged on."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from papaya.errors import OperatorError
from papaya.learning.definition import ClientSGD
from papaya.sim.draws import Floats
from papaya.sim.population import DEFAULT, volume_quantiles
from papaya.study.data.source import Memory
from papaya.study.workloads.base import Clients
from papaya.study.workloads.lstm_trainers import Tokens
from papaya.study.workloads.text import (
    ALPHABET,
    STEPS,
    WINDOW,
    Corpus,
    TextEmbedding,
    TextWindows,
    corpus_of,
    open_corpus,
    windows_of_text,
)

WORDS = "the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. "


def a_text(client: int, length: int) -> str:
    rng = np.random.default_rng(client)
    return "".join(rng.permutation(list(WORDS * length)).tolist())


def a_corpus() -> Corpus:
    texts = [a_text(client, 20 * (1 + client)) for client in range(5)]
    return corpus_of(Memory("made up", map(windows_of_text, texts)))


def devices(*examples: int) -> Clients:
    count = len(examples)
    return Clients(np.arange(count), np.zeros(count, np.int64), np.array(examples))


def test_windows_lose_no_pair_of_characters() -> None:
    text = "".join(map(chr, range(0x21, 0x21 + 3 * STEPS + 1)))
    windows = [np.frombuffer(window, np.uint8) for window in windows_of_text(text)]
    assert [len(window) for window in windows] == [WINDOW] * 3
    pairs = [pair for window in windows for pair in pairwise(window)]
    assert pairs == [(code, code + 1) for code in range(1, 3 * STEPS + 1)]


def test_white_space_is_one_space_and_other_characters_are_one_symbol() -> None:
    [window] = windows_of_text("a \n\t  b" + "é" + "\u4e2d" * 17)
    assert list(window[:3]) == [ord("a") - 0x20, 0, ord("b") - 0x20]
    assert set(window[3:]) == {ALPHABET - 1}


def test_clients_are_ordered_by_their_text_and_dropped_ones_are_counted() -> None:
    texts = ["short", a_text(1, 60), "x" * WINDOW, a_text(2, 20)]
    corpus = corpus_of(Memory("made up", map(windows_of_text, texts)))
    assert corpus.clients == 2
    assert np.all(np.diff(np.diff(corpus.training_from)) > 0)
    assert sum(count for _, count in corpus.dropped) == 2
    assert "without" in corpus.about
    assert corpus.digest in corpus.about


def test_a_corpus_is_kept_as_it_is(tmp_path: Path) -> None:
    corpus = a_corpus()
    corpus.save(tmp_path / "corpus.npz")
    kept = Corpus.load(tmp_path / "corpus.npz")
    assert (kept.digest, kept.about) == (corpus.digest, corpus.about)
    with pytest.raises(OperatorError, match="cannot read corpus"):
        Corpus.load(tmp_path / "other.npz")


def test_a_folder_of_texts_and_leaf_users_are_clients(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for client in range(3):
        (texts / f"{client}.txt").write_text(a_text(client, 20), encoding="utf-8")
    assert open_corpus(str(texts)).clients == 3
    users = {
        f"u{client}": {
            "x": [a_text(client + 10 * i, 1)[:80] for i in range(60)],
            "y": ["a"] * 60,
        }
        for client in range(2)
    }
    leaf = {"users": list(users), "num_samples": [60, 60], "user_data": users}
    (tmp_path / "leaf.json").write_text(json.dumps(leaf), encoding="utf-8")
    assert open_corpus(str(tmp_path / "leaf.json")).clients == 2
    for name in users:
        users[name]["x"] = [[i, 2] for i in range(60)]  # type: ignore[misc]
    (tmp_path / "leaf.json").write_text(json.dumps(leaf), encoding="utf-8")
    with pytest.raises(OperatorError, match="not text"):
        open_corpus(str(tmp_path / "leaf.json"))
    with pytest.raises(OperatorError, match="there is no"):
        open_corpus(str(tmp_path / "nothing"))


def test_a_device_holds_the_client_at_the_quantile_of_its_volume() -> None:
    corpus = a_corpus()
    source = TextWindows(corpus, DEFAULT, 1)
    least, most = (int(v) for v in volume_quantiles(DEFAULT, 1000)[[0, -1]])
    tokens, offsets = source.sequences(devices(least, most), 1500)
    assert offsets.tolist() == [0, least, least + most]
    small = corpus.training[: corpus.training_from[1]].tolist()
    large = corpus.training[corpus.training_from[-2] :].tolist()
    assert all(window in small for window in tokens[:least].tolist())
    assert all(window in large for window in tokens[least:].tolist())
    again, _ = source.sequences(devices(least, most), 1500)
    assert np.array_equal(again, tokens)
    other, _ = TextWindows(corpus, DEFAULT, 2).sequences(devices(least, most), 1500)
    assert not np.array_equal(other, tokens)


def test_every_client_is_held_by_as_many_devices() -> None:
    corpus = a_corpus()
    examples = volume_quantiles(DEFAULT, 20_000)
    source = TextWindows(corpus, DEFAULT, 1)
    held = source.holders.client_of(devices(*examples.tolist()))
    shares = np.bincount(held, minlength=corpus.clients) / len(held)
    assert shares == pytest.approx(np.full(corpus.clients, 1 / corpus.clients), abs=0.02)


def test_the_compiled_loop_trains_as_numpy() -> None:
    corpus = a_corpus()
    fast, slow = (TextEmbedding(corpus, DEFAULT, 1, kernel=k) for k in ("fastest", "numpy"))
    model, clients = fast.initial(3), devices(1, 40, 700)
    start, sgd = np.zeros(3, np.int64), ClientSGD(rate=1.0)
    found, expected = (w.train([model], start, clients, sgd) for w in (fast, slow))
    assert found == pytest.approx(expected, abs=2e-6)
    assert np.abs(expected).max() > 1e-3
    alone = fast.train([model], start[:1], clients.take(slice(1, 2)), sgd)
    assert np.array_equal(alone[0], found[1])


def test_the_loss_is_the_mean_over_all_held_out_pairs_of_all_clients() -> None:
    corpus = a_corpus()
    workload = TextEmbedding(corpus, DEFAULT, 1)
    model = workload.initial(3)
    logits = workload.logits(model.astype(np.float64))
    losses = np.log(np.exp(logits).sum(axis=1))[:, None] - logits
    by_client = []
    for client in range(corpus.clients):
        rows = slice(*corpus.held_out_from[client : client + 2].tolist())
        windows = corpus.held_out[rows].astype(np.int64)
        by_client.append(float(losses[windows[:, :-1], windows[:, 1:]].mean()))
    volumes = volume_quantiles(DEFAULT, corpus.clients)
    quality = workload.evaluate(model)
    assert quality.all == pytest.approx(np.average(by_client, weights=volumes))
    assert quality.p75 == pytest.approx(np.average(by_client[3:], weights=volumes[3:]))
    assert quality.p99 == pytest.approx(by_client[-1])
    assert quality.all_by_clients == pytest.approx(np.mean(by_client))

    def losses_of(tokens: Tokens) -> Floats:
        found: Floats = losses[tokens[:, :-1], tokens[:, 1:]].mean(axis=1)
        return found

    judged = TextWindows(corpus, DEFAULT, 1).quality(losses_of)
    assert judged.all == pytest.approx(quality.all)
    assert judged.p99 == pytest.approx(quality.p99)


def test_no_model_of_pairs_has_less_loss_than_the_floor() -> None:
    corpus = a_corpus()
    workload = TextEmbedding(corpus, DEFAULT, 1)
    assert 0 < workload.floor < workload.evaluate(workload.initial(1)).all
    assert workload.floor < math.log(ALPHABET)
    clients, sgd = devices(*[500] * 20), ClientSGD(rate=1.0)
    model = workload.initial(1)
    for _ in range(30):
        model = model + workload.train([model], np.zeros(20, np.int64), clients, sgd).mean(axis=0)
    reached = workload.evaluate(model).all
    assert workload.floor < reached < workload.evaluate(workload.initial(1)).all - 0.5
