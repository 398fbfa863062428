"""A next-word model over source code: the task of `make demo`, and a start for your own.

The last three words predict the next one: an embedding, a small perceptron, and the embedding
again as the output layer. A device trains it in a fraction of a second.

The vocabulary is fixed here, so that no device has to reveal its words: the most common words of
the language have their own place; all others share 1,792 places, chosen by their checksum.

An example is described by a field, not by code, and the loss has one number for each example, so
that the task also trains on devices without torch: papaya task compile examples/next_word.py

    papaya task submit examples/next_word.py
    papaya client --task examples/next_word.py --store device.db

`load_examples` turns a text into the examples of the device's collection "text".
"""

import re

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from papaya.learning.example_fields import WordPlaces
from papaya.learning.task import (
    AsyncFL,
    ClientSGD,
    EvaluationPlan,
    Examples,
    OptimizerConfig,
    SecureAggregation,
    Task,
)

CONTEXT = 3  # words that the model sees
WINDOW = 8  # words that the model predicts in one example
PLACES = 2048
WIDTH = 32

_COMMON = """
<start> <line> False None True and as assert async await break class continue def del elif else
except finally for from global if import in is lambda nonlocal not or pass raise return try while
with yield self cls super object type int str float bool bytes list dict set tuple len range print
open isinstance issubclass hasattr getattr setattr repr sorted enumerate zip map filter min max sum
any all abs iter next format property staticmethod classmethod name value key item args kwargs
result data line lines text path file files module os sys re io time logging warnings errno
Exception ValueError TypeError KeyError IndexError AttributeError RuntimeError OSError ImportError
NotImplementedError StopIteration __init__ __name__ __main__ __all__ __repr__ __eq__ __file__
append extend join split strip startswith endswith replace encode decode read write close get pop
update items keys values copy add remove sort index insert i j k n x y s f c a b p e m d t
the a of to is be that this it an by on are if not or and with from as can has have will when at
default string number function method return returns called used use one two first last new
0 1 2 3 4 8 10 16 64 100 test assertEqual assertRaises
( ) [ ] { } . , : ; = + - * / % @ ! < > & | ^ ~ ' " \\ # _ ` ? $ == != <= >= -> ** // += -= >>
<< ... \""" '''
"""
SHARED = 256  # the first place that words share

_WORD = re.compile(r"[A-Za-z_]+|\d+|\"\"\"|'''|\.\.\.|[=!<>+-]=|->|\*\*|//|>>|<<|[^\w\s]|\n")


def load_examples(text: str) -> list[bytes]:
    """The examples of a text: windows of eight words, each with the three words before it."""
    words = ["<line>" if word == "\n" else word for word in _WORD.findall(text)]
    words = ["<start>"] * CONTEXT + words
    ends = range(CONTEXT + WINDOW, len(words) + 1, WINDOW)
    return [" ".join(words[end - WINDOW - CONTEXT : end]).encode() for end in ends]


class NextWord(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(PLACES, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.hidden = nn.Linear(CONTEXT * WIDTH, 64)
        self.back = nn.Linear(64, WIDTH)
        self.bias = nn.Parameter(torch.zeros(PLACES))

    def forward(self, before: Tensor) -> Tensor:
        seen = self.embedding(before).flatten(1)
        wanted = self.back(torch.tanh(self.hidden(seen)))
        return wanted @ self.embedding.weight.T + self.bias


def pairs(words: Tensor) -> tuple[Tensor, Tensor]:
    """For every word of every window: the places of the words before it, and its own."""
    before = torch.stack([words[:, i : i + WINDOW] for i in range(CONTEXT)], dim=-1)
    return before.flatten(0, 1), words[:, CONTEXT:].flatten()


def loss(module: nn.Module, words: Tensor) -> Tensor:
    """One loss for each window: the mean over its words."""
    before, targets = pairs(words)
    losses = cross_entropy(module(before), targets, reduction="none")
    return losses.unflatten(0, (-1, WINDOW)).mean(1)


task = Task(
    name="next-word",
    model=NextWord,
    loss=loss,
    batch=(WordPlaces(CONTEXT + WINDOW, PLACES, tuple(dict.fromkeys(_COMMON.split())), SHARED),),
    examples=Examples("text"),
    client=ClientSGD(rate=0.3, epochs=1, batch_size=32, max_examples=500),
    regime=AsyncFL(aggregation_goal=10),  # or SyncFL(over_selection=0.3)
    concurrency=24,
    optimizer=OptimizerConfig(kind="fedadam", rate=0.01, beta1=0.2, beta2=0.99),
    evaluation=EvaluationPlan(every_versions=5, clients=16),
    perplexity=True,  # a language model: show exp(loss)
    secure_aggregation=SecureAggregation(),  # the server sees only sums of 10 updates
    clip=2.0,  # nearly all updates are shorter; the first ones are the longest
    participation_gap_s=0.0,  # a demonstration: the same devices come back at once
    sample=load_examples("import os\n\ndef main():\n    print(os.getcwd())\n"),
)
