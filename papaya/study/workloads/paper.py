"""The models and data of `papaya reproduce`, by name.

Models: the embedding model, which is small enough for everything, and an LSTM like the paper's for
the training curves, in two sizes. Data: the synthetic language in three dialects, and real text.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

from msgspec import structs

from papaya.errors import InvariantError
from papaya.sim.population import PopulationConfig
from papaya.study.workloads.base import Workload
from papaya.study.workloads.language import EmbeddingWorkload, Language, LanguageConfig
from papaya.study.workloads.lstm import Lstm, Walks
from papaya.study.workloads.lstm_trainers import LstmSizes
from papaya.study.workloads.text import Corpus, TextEmbedding, TextWindows

Model = Literal["embedding", "lstm", "small-lstm"]
Dialect = Literal["none", "weak", "strong"]
DIALECTS: Final[dict[str, LanguageConfig]] = {
    "none": LanguageConfig(conflict=0.0),
    "weak": LanguageConfig(),
    "strong": LanguageConfig(conflict=0.4, dialect_volume=150.0, dialect_width=0.2),
}
LSTMS: Final[dict[str, LstmSizes]] = {
    "lstm": LstmSizes(),
    "small-lstm": LstmSizes(embedding=16, hidden=32),
}
_TEXT: Final = "text-"


def text_data(corpus: Corpus) -> str:
    """The name of its data."""
    return f"{_TEXT}{corpus.digest}"


def is_text(data: str) -> bool:
    return data.startswith(_TEXT)


def keep_corpus(corpus: Corpus, folder: Path) -> None:
    """Where `paper_workload` finds it in any process."""
    path = folder / corpus_file(text_data(corpus))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        corpus.save(path)


def kept_corpus(folder: Path, data: str) -> Corpus:
    return Corpus.load(folder / corpus_file(data))


def corpus_file(data: str) -> str:
    """Its name in the folder."""
    return f"corpora/{data}.npz"


@lru_cache(maxsize=64)
def paper_workload(
    model: str, population: PopulationConfig, data: str, seed: int, folder: Path | None = None
) -> Workload:
    """A `Model` of a `Dialect` or of a kept text, judged on this population. `seed` names the
    language and everybody's data; of a text, who holds what of it.
    """
    if is_text(data):
        if folder is None:
            raise InvariantError(f"{data} needs the folder in which its corpus is kept")
        corpus = _corpus(folder, data)
        if model == "embedding":
            return TextEmbedding(corpus, population, seed)
        return Lstm(TextWindows(corpus, population, seed), LSTMS[model])
    config = structs.replace(DIALECTS[data], seed=seed)
    if model == "embedding":
        return EmbeddingWorkload(population, Language(config), seed=seed)
    sizes = LSTMS[model]
    language = Language(structs.replace(config, vocabulary=sizes.vocabulary))
    return Lstm(Walks(language, sizes.steps, population, seed=seed), sizes)


_corpus = lru_cache(maxsize=2)(kept_corpus)
