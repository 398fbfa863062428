"""How clients train: one encoding for one meaning, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from papaya.errors import ConfigError
from papaya.learning.definition import ClientSGD
from papaya.learning.schedules import ConstantRate, CosineDecay, StepDecay

PLAIN = (
    b'{"rate":0.1,"momentum":0.0,"weight_decay":0.0,"epochs":1,"batch_size":32,"max_examples":1500}'
)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": "sgd"},
        {"nesterov": False},
        {"proximal": 0.0},
        {"precision": "float32"},
        {"max_gradient_norm": 0},
        {"schedule": ConstantRate()},
    ],
)
def test_settings_without_effect_do_not_change_the_encoding(settings: dict[str, Any]) -> None:
    client = ClientSGD(rate=0.1, **settings)
    assert client == ClientSGD(rate=0.1)
    assert msgspec.json.encode(client) == PLAIN
    assert client.beyond_plain == {}


def test_the_settings_of_adam_are_signed_also_if_they_are_the_usual_ones() -> None:
    encoded = msgspec.json.encode(ClientSGD(rate=0.1, optimizer="adam"))
    assert encoded.endswith(b',"optimizer":"adam","beta1":0.9,"beta2":0.999,"epsilon":1e-8}')


@pytest.mark.parametrize(
    "client",
    [
        ClientSGD(rate=0.1, momentum=0.9, nesterov=True, proximal=0.1, max_gradient_norm=2.0),
        ClientSGD(rate=0.1, optimizer="adamw", beta1=0.5, weight_decay=0.01),
        ClientSGD(rate=0.1, schedule=CosineDecay(warmup_steps=3, end=0.1)),
        ClientSGD(rate=0.1, schedule=StepDecay(every_steps=3)),
        ClientSGD(rate=0.1, precision="bfloat16"),
    ],
)
def test_settings_are_read_as_they_were_written(client: ClientSGD) -> None:
    encoded = msgspec.json.encode(client)
    assert msgspec.json.decode(encoded, type=ClientSGD) == client
    assert encoded != PLAIN
    assert client.beyond_plain


def test_a_field_of_a_later_version_is_refused() -> None:
    """A device that ignored it would train something else than the owner signed."""
    with pytest.raises(msgspec.ValidationError, match="unknown field `sharpness`"):
        msgspec.json.decode(PLAIN[:-1] + b',"sharpness":1}', type=ClientSGD)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"optimizer": "lamb"}, "not one of sgd, adam, adamw"),
        ({"precision": "float16"}, "not one of float32, bfloat16"),
        ({"beta1": 0.9}, "client.beta1 = 0.9: is for Adam and AdamW"),
        ({"optimizer": "adam", "beta2": 1.0}, "client.beta2"),
        ({"optimizer": "adam", "epsilon": 0.0}, "client.epsilon"),
        ({"optimizer": "adam", "momentum": 0.9}, "no momentum of SGD"),
        ({"optimizer": "adamw", "nesterov": True}, "no momentum of SGD"),
        ({"nesterov": True}, "client.nesterov = True: needs momentum"),
        ({"proximal": -1.0}, "client.proximal"),
        ({"proximal": float("nan")}, "client.proximal"),
        ({"max_gradient_norm": float("inf")}, "client.max_gradient_norm"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ClientSGD(rate=0.1, **settings)


@pytest.mark.parametrize(("examples", "steps"), [(1, 3), (10, 3), (11, 6), (25, 6), (900, 6)])
def test_the_number_of_steps_follows_from_the_examples(examples: int, steps: int) -> None:
    client = ClientSGD(rate=0.1, epochs=3, batch_size=10, max_examples=20)
    assert client.steps(examples) == steps
