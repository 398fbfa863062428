"""Real text as the data of a population: a client per file or LEAF user, character by character.

A text is brought to one line (white space becomes single spaces) and cut into windows of `WINDOW`
characters; neighbours share one, so that no pair of characters is lost. Windows are held out by
the rule of the devices' example store. Characters outside printable ASCII are one symbol.

How much data a device holds and how fast it is, the simulated population says: so the recorded runs
are those of the synthetic language, and only what is learnt differs. A device whose volume is at a
quantile of the population holds the client at the same quantile of the texts; its examples are
drawn from that client's training windows by a hash of (seed, device, number). A model is judged on
all held-out windows of all clients; a client weighs as the devices do that hold it.

An example of the LSTM is a window; an example of the embedding model is a pair of neighbouring
characters, and its loss on the held-out text is a finite sum over pairs, computed exactly.

Refused: LEAF data whose `x` is not text.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from papaya.device.texts import library_texts
from papaya.errors import OperatorError
from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import FLOAT32, Vector
from papaya.sim.draws import (
    Floats,
    HashWords,
    Ints,
    counters,
    splitmix64,
    splitmix64_words,
    uniforms,
)
from papaya.sim.population import PopulationConfig, volume_quantiles
from papaya.study.data.leaf import leaf_source
from papaya.study.data.source import Memory
from papaya.study.data.texts import folder_source, text_source
from papaya.study.workloads.base import Clients, Matrix, Quality, require_plain_sgd
from papaya.study.workloads.language import EmbeddingWorkload, compiled_loop, log_odds_of
from papaya.study.workloads.lstm_trainers import Tokens

Windows = npt.NDArray[np.uint8]

ALPHABET: Final = 96  # printable ASCII, and one symbol for everything else
_FIRST: Final = 0x20
_OTHER: Final = ALPHABET - 1
_HOLDS_STATEMENTS: Final = (ast.stmt, ast.excepthandler, ast.match_case)
STEPS: Final = 20
WINDOW: Final = STEPS + 1
LIBRARY_NAME: Final = "stdlib-docs"
_QUANTILES: Final = 1 << 16
_LEVELS: Final = (0.0, 0.75, 0.99)
_HOLDER, _DRAWS = 141, 142  # apart from the quantities of `Population` and of other workloads


@dataclass(frozen=True, eq=False)
class Corpus:
    """The windows of all clients, which are in ascending order of training windows.

    Client c has the rows training_from[c] to training_from[c + 1] of `training`; alike the
    held-out ones. `dropped` says how many clients were left out, and why.
    """

    name: str
    training: Windows
    training_from: Ints
    held_out: Windows
    held_out_from: Ints
    dropped: tuple[tuple[str, int], ...] = ()

    @property
    def clients(self) -> int:
        return len(self.training_from) - 1

    @cached_property
    def digest(self) -> str:
        """Of all windows and whose they are."""
        hasher = hashlib.sha256()
        for column in (self.training, self.training_from, self.held_out, self.held_out_from):
            hasher.update(str(column.shape).encode() + np.ascontiguousarray(column).tobytes())
        return hasher.hexdigest()[:16]

    @property
    def about(self) -> str:
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in self.dropped if count)
        return (
            f"{self.name}: {self.clients:,} clients, {len(self.training):,} windows of {WINDOW} "
            f"characters to train on, {len(self.held_out):,} held out; digest {self.digest}; "
            f"clients dropped: {dropped or 'none'}"
        )

    def save(self, path: Path) -> None:
        reasons = json.dumps({"name": self.name, "dropped": self.dropped})
        with path.open("wb") as file:
            np.savez(
                file,
                about=np.frombuffer(reasons.encode(), np.uint8),
                training=self.training,
                training_from=self.training_from,
                held_out=self.held_out,
                held_out_from=self.held_out_from,
            )

    @classmethod
    def load(cls, path: Path) -> Corpus:
        try:
            with np.load(path, allow_pickle=False) as file:
                about = json.loads(file["about"].tobytes())
                columns = {name: file[name] for name in file.files if name != "about"}
        except (OSError, ValueError, KeyError) as error:
            raise OperatorError(f"cannot read corpus {path}: {error}", hint="delete it") from error
        dropped = tuple((reason, count) for reason, count in about["dropped"])
        return cls(name=about["name"], dropped=dropped, **columns)


def open_corpus(data: str) -> Corpus:
    """`stdlib-docs`, `leaf:PATH`, `text:FOLDER`, or a path: of LEAF's JSON, or of texts."""
    kind, _, rest = data.partition(":")
    path = Path(rest if kind in ("leaf", "text") and rest else data)
    if data == LIBRARY_NAME:
        return library_corpus()
    if not path.exists():
        raise OperatorError(
            f"there is no {path}",
            hint=f"use {LIBRARY_NAME}, a folder with texts or LEAF's JSON files",
        )
    if kind == "leaf" or (kind != "text" and (path.is_file() or any(path.glob("*.json")))):
        return corpus_of(leaf_source(path), _leaf_windows)
    return corpus_of(folder_source(path, windows_of_text))


@cache
def library_corpus() -> Corpus:
    """The documentation of Python's standard library: the docstrings of each source file, in the
    order of `ast.walk`, of the running interpreter. Files are those of `library_texts`.
    """
    name = f"docstrings of the standard library of Python {platform.python_version()}"
    sources = [path for path in library_texts() if path.suffix == ".py"]
    return corpus_of(text_source(name, sources, _windows_of_documentation))


def own_window(example: bytes) -> list[bytes]:
    """Of an example that is a window already."""
    return [example]


def corpus_of(
    source: Memory, windows_of: Callable[[bytes], Sequence[bytes]] = own_window
) -> Corpus:
    whole = range(len(source.volumes))
    training = [_cut(source.training(c), windows_of) for c in whole]
    held_out = [_cut(source.held_out(c), windows_of) for c in whole]
    chosen = [c for c in whole if len(training[c]) and len(held_out[c])]
    if not chosen:
        raise OperatorError(
            f"{source.name}: no client has a window of {WINDOW} characters to train on and "
            "another one that is held out",
            hint="use longer texts: a tenth of all windows is held out",
        )
    chosen.sort(key=lambda c: len(training[c]))
    empty = sum(not len(windows) for windows in training)
    dropped = (
        ("without a window to train on", sum(source.left_out.values()) + empty),
        ("without a held-out window", len(whole) - len(chosen) - empty),
    )
    return Corpus(
        source.name,
        *_joined([training[c] for c in chosen]),
        *_joined([held_out[c] for c in chosen]),
        dropped,
    )


def _cut(examples: Sequence[bytes], windows_of: Callable[[bytes], Sequence[bytes]]) -> Windows:
    whole = b"".join(window for example in examples for window in windows_of(example))
    return np.frombuffer(whole, np.uint8).reshape(-1, WINDOW)


def _joined(parts: Sequence[Windows]) -> tuple[Windows, Ints]:
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    return np.concatenate(parts), np.concatenate([np.zeros(1, np.int64), ends])


def windows_of_text(text: str) -> list[bytes]:
    line = " ".join(text.split()).encode("utf-32-le")
    codes = np.frombuffer(line, np.uint32).astype(np.int64) - _FIRST
    codes = np.where((codes >= 0) & (codes < _OTHER), codes, _OTHER).astype(np.uint8)
    starts = range(0, len(codes) - STEPS, STEPS)
    return [codes[start : start + WINDOW].tobytes() for start in starts]


def _windows_of_documentation(source: str) -> list[bytes]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        ast.get_docstring(node)
        for node in _statements(ast.parse(source))
        if isinstance(node, documented)
    ]
    return windows_of_text("\n".join(filter(None, found)))


def _statements(module: ast.Module) -> Iterator[ast.AST]:
    """In the order of `ast.walk`, without the expressions, which hold no statements."""
    waiting = deque[ast.AST]([module])
    while waiting:
        node = waiting.popleft()
        yield node
        inner = ast.iter_child_nodes(node)
        waiting.extend(child for child in inner if isinstance(child, _HOLDS_STATEMENTS))


def _leaf_windows(example: bytes) -> list[bytes]:
    content = json.loads(example)
    x, y = content["x"], content["y"]
    if not isinstance(x, str):
        raise OperatorError(
            f"LEAF's x is a {type(x).__name__}, not text", hint="use LEAF's shakespeare or reddit"
        )
    return windows_of_text(x + y if isinstance(y, str) else x)


class _Holders:
    """Which client's text each device holds, and what it draws from it."""

    def __init__(self, corpus: Corpus, population: PopulationConfig, seed: int) -> None:
        self.corpus = corpus
        self.volumes = volume_quantiles(population, corpus.clients)  # what each client stands for
        self._quantiles = volume_quantiles(population, _QUANTILES)
        self._holder = np.uint64(splitmix64(seed, _HOLDER))
        self._draws = np.uint64(splitmix64(seed, _DRAWS))

    def client_of(self, clients: Clients) -> Ints:
        """The client at the quantile of the device's volume; among devices of equal volume, a
        hash decides.
        """
        first = np.searchsorted(self._quantiles, clients.examples, side="left")
        last = np.searchsorted(self._quantiles, clients.examples, side="right")
        point = uniforms(splitmix64_words(self._holder, counters(clients.device)))
        place = (first + point * (last - first)) / _QUANTILES * self.corpus.clients
        found: Ints = np.minimum(place.astype(np.int64), self.corpus.clients - 1)
        return found

    def drawn(self, clients: Clients, most: int) -> tuple[Ints, HashWords, Ints]:
        """(rows of `corpus.training`, hashes, offsets) of the first examples of these clients."""
        counts = np.minimum(clients.examples, most)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        owner = np.repeat(np.arange(len(clients)), counts)
        number = np.arange(len(owner)) - offsets[owner]
        states = splitmix64_words(self._draws, counters(clients.device))
        words = splitmix64_words(states[owner], number.astype(np.uint64))
        holder = self.client_of(clients)
        first = self.corpus.training_from[holder]
        count = self.corpus.training_from[holder + 1] - first
        rows = first[owner] + ((words >> np.uint64(32)) % count[owner].astype(np.uint64)).astype(
            np.int64
        )
        return rows, words, offsets

    def quality(self, losses: Floats) -> Quality:
        """Of the mean loss of each client."""
        tails = [slice(int(level * self.corpus.clients), None) for level in _LEVELS]
        all_, p75, p99 = (np.average(losses[t], weights=self.volumes[t]) for t in tails)
        return Quality(float(all_), float(p75), float(p99), float(losses.mean()))


class TextWindows:
    """Sequences for the LSTM."""

    def __init__(self, corpus: Corpus, population: PopulationConfig, seed: int) -> None:
        self.holders = _Holders(corpus, population, seed)

    def sequences(self, clients: Clients, most: int) -> tuple[Tokens, Ints]:
        rows, _, offsets = self.holders.drawn(clients, most)
        return self.holders.corpus.training[rows].astype(np.int32), offsets

    def quality(self, losses_of: Callable[[Tokens], Floats]) -> Quality:
        corpus = self.holders.corpus
        losses = losses_of(corpus.held_out.astype(np.int32))
        sums = np.add.reduceat(losses, corpus.held_out_from[:-1])
        return self.holders.quality(sums / np.diff(corpus.held_out_from))


class TextEmbedding(EmbeddingWorkload):
    """The embedding model on pairs of neighbouring characters."""

    def __init__(
        self, corpus: Corpus, population: PopulationConfig, seed: int, **options: Any
    ) -> None:
        super().__init__(population, seed=seed, **options)
        self.holders = _Holders(corpus, population, seed)
        self._pairs_loop = None if self._loop is None else compiled_loop("embedding_of_pairs")

    def train(
        self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD
    ) -> Matrix:
        require_plain_sgd(sgd)
        updates = np.empty((len(start), self.length), FLOAT32)
        if not len(start):
            return updates
        words, following, offsets = self._pairs_of(clients, sgd.max_examples)
        if self._pairs_loop is not None:
            how = (np.float32(sgd.rate), sgd.epochs, sgd.batch_size)
            self._pairs_loop(np.stack(models), start, words, following, offsets, *how, updates)
            return updates
        with np.errstate(all="ignore"):  # who gets the update sees that it is not finite
            for row, (first, last) in enumerate(pairwise(offsets.tolist())):
                model, own = models[start[row]], slice(first, last)
                trained = self._trained(model, words[own], following[own], sgd)
                np.subtract(trained, model, out=updates[row])
        return updates

    def _pairs_of(self, clients: Clients, most: int) -> tuple[Ints, Ints, Ints]:
        rows, words, offsets = self.holders.drawn(clients, most)
        places = (words & np.uint64(0xFFFFFFFF)) % np.uint64(STEPS)
        place = places.astype(np.int64)
        windows = self.holders.corpus.training
        first, second = windows[rows, place], windows[rows, place + 1]
        return first.astype(np.int64), second.astype(np.int64), offsets

    def evaluate(self, parameters: Vector) -> Quality:
        """Exactly, over all held-out pairs."""
        losses = -(self._judged * log_odds_of(self.logits(parameters.astype(np.float64))))
        return Quality(*map(float, losses.sum(axis=(1, 2))))

    @property
    def floor(self) -> float:
        """The entropy of the held-out text, given one character: no model of pairs has less."""
        joint = self._judged[0]
        given = joint.sum(axis=1, keepdims=True)
        seen = joint > 0
        odds = np.divide(joint, given, out=np.ones_like(joint), where=seen)
        return float(-(joint * np.log(odds)).sum())

    @cached_property
    def _judged(self) -> Floats:
        """The share of each pair of characters: in all held-out text, in that of clients at or
        above the 75th and the 99th percentile, and of the mean client.
        """
        corpus, volumes = self.holders.corpus, self.holders.volumes
        count = corpus.clients
        shares = np.zeros((len(_LEVELS) + 1, ALPHABET, ALPHABET))
        weights = np.ones((len(_LEVELS) + 1, count))
        for level, tail in zip(weights, _LEVELS, strict=False):
            level *= volumes
            level[: int(tail * count)] = 0
        weights /= weights.sum(axis=1, keepdims=True)
        for client, (first, last) in enumerate(pairwise(corpus.held_out_from.tolist())):
            windows = corpus.held_out[first:last].astype(np.int64)
            pairs = (windows[:, :-1] * ALPHABET + windows[:, 1:]).ravel()
            seen, often = np.unique(pairs, return_counts=True)
            own = np.multiply.outer(weights[:, client], often / len(pairs))
            shares.reshape(len(shares), -1)[:, seen] += own
        return shares
