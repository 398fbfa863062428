"""The six models in JAX, with PyTorch's names and layouts (`torch_models.py`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Tree = Any
_HEADS = 4


def loss(model: str, form: dict[str, Any], p: Tree, inputs: Any, targets: Any) -> Any:
    scores = _FORWARD[model](p, inputs, form)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), targets[..., None], axis=-1)
    return -chosen.mean()


def _linear(p: Tree, name: str, x: Any) -> Any:
    if f"{name}.base.weight" in p:
        adapted = (x @ p[f"{name}.down"].T) @ p[f"{name}.up"].T
        return _linear(p, f"{name}.base", x) + adapted
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def _perceptron(p: Tree, x: Any, form: dict[str, Any]) -> Any:
    activation = getattr(jax.nn, form["activation"])
    for layer in range(form["depth"]):
        x = activation(_linear(p, f"hidden.{layer}", x))
    return _linear(p, "output", x)


def _cnn(p: Tree, x: Any, form: dict[str, Any]) -> Any:
    for name in ("first", "second"):
        kinds = ("NCHW", "OIHW", "NCHW")
        weight, ones = p[f"{name}.weight"], (1, 1)
        x = lax.conv_general_dilated(x, weight, ones, "SAME", dimension_numbers=kinds)
        x = jax.nn.relu(x + p[f"{name}.bias"][:, None, None])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return _linear(p, "output", x.reshape(x.shape[0], -1))


def _normal(p: Tree, name: str, x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    x = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return x * p[f"{name}.weight"] + p[f"{name}.bias"]


def _transformer(p: Tree, words: Any, form: dict[str, Any]) -> Any:
    x = p["embedding.weight"][words] + p["places"]
    count, steps, width = x.shape
    is_later = jnp.triu(jnp.ones((steps, steps), bool), 1)
    for block in ("blocks.0", "blocks.1"):
        split = _linear(p, f"{block}.queries", _normal(p, f"{block}.before", x))
        split = split.reshape(count, steps, 3, _HEADS, -1)
        queries, keys, values = jnp.moveaxis(split, 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / jnp.sqrt(width / _HEADS)
        weights = jax.nn.softmax(jnp.where(is_later, -jnp.inf, scores))
        found = jnp.einsum("bhqk,bkhd->bqhd", weights, values).reshape(count, steps, width)
        x = x + _linear(p, f"{block}.mixed", found)
        wide = _linear(p, f"{block}.wide", _normal(p, f"{block}.between", x))
        x = x + _linear(p, f"{block}.narrow", jax.nn.gelu(wide, approximate=False))
    return _linear(p, "output", _normal(p, "after", x))


def _lstm(p: Tree, words: Any, form: dict[str, Any]) -> Any:
    entering = _entering(p, words) + p["cells.bias_hh_l0"]
    recurrent = p["cells.weight_hh_l0"].T

    def step(state: Any, entered: Any) -> Any:
        cell, hidden = state
        enter, forget, new, leave = jnp.split(entered + hidden @ recurrent, 4, axis=1)
        cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(enter) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(leave) * jnp.tanh(cell)
        return (cell, hidden), hidden

    zero = jnp.zeros((words.shape[0], recurrent.shape[0]), jnp.float32)
    _, hidden = lax.scan(step, (zero, zero), entering)
    return _linear(p, "output", hidden.swapaxes(0, 1))


def _gru(p: Tree, words: Any, form: dict[str, Any]) -> Any:
    recurrent, bias = p["cells.weight_hh_l0"].T, p["cells.bias_hh_l0"]

    def step(hidden: Any, entered: Any) -> Any:
        reset_in, update_in, new_in = jnp.split(entered, 3, axis=1)
        reset_by, update_by, new_by = jnp.split(hidden @ recurrent + bias, 3, axis=1)
        reset, update = jax.nn.sigmoid(reset_in + reset_by), jax.nn.sigmoid(update_in + update_by)
        new = jnp.tanh(new_in + reset * new_by)
        hidden = (1 - update) * new + update * hidden
        return hidden, hidden

    zero = jnp.zeros((words.shape[0], recurrent.shape[0]), jnp.float32)
    _, hidden = lax.scan(step, zero, _entering(p, words))
    return _linear(p, "output", hidden.swapaxes(0, 1))


def _entering(p: Tree, words: Any) -> Any:
    """What all steps add to the gates, in one product: (step, example, gates)."""
    return p["embedding.weight"][words.T] @ p["cells.weight_ih_l0"].T + p["cells.bias_ih_l0"]


_FORWARD = {
    "perceptron": _perceptron,
    "cnn": _cnn,
    "transformer": _transformer,
    "lora": _transformer,
    "gru": _gru,
    "lstm": _lstm,
}
