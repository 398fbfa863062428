"""The models of the paper's evaluation, as `papaya reproduce` learns them.

An LSTM for the training curves, a smaller model for all else. One seed of the language's data for
all runs: their seeds differ in the fleet, in who takes part and when.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Literal

from msgspec import structs

from papaya.sim.population import PopulationConfig
from papaya.study.workloads.base import Workload
from papaya.study.workloads.embedding import EmbeddingWorkload
from papaya.study.workloads.language import Language, LanguageConfig
from papaya.study.workloads.lstm import Lstm, Walks
from papaya.study.workloads.lstm_trainers import LstmSizes

LANGUAGE: Final = LanguageConfig()
_LSTM: Final = LstmSizes()

Model = Literal["embedding", "lstm"]


@lru_cache(maxsize=2)
def paper_workload(model: str, population: PopulationConfig) -> Workload:
    """A `Model`, judged on this population."""
    if model == "embedding":
        return EmbeddingWorkload(population, Language(LANGUAGE))
    language = Language(structs.replace(LANGUAGE, vocabulary=_LSTM.vocabulary))
    return Lstm(Walks(language, _LSTM.steps, population), _LSTM)
