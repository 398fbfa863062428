"""Extensions: code of the servers that a task names, with numbers as parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from papaya.config import AsyncFL, OptimizerConfig, Staleness, TaskConfig
from papaya.errors import ConfigError, OperatorError, ProtocolError
from papaya.learning import extensions
from papaya.learning.entry_points import load, load_used, parsed
from papaya.learning.methods import require_methods
from papaya.learning.parameters import Tensor, Vector
from papaya.learning.server_optimizer import ServerOptimizer, server_optimizer
from papaya.learning.weighting import staleness_weight


def a_config(**changes: Any) -> TaskConfig:
    fields: dict[str, Any] = {"task": "t", "concurrency": 20, "model_length": 4}
    return TaskConfig(**(fields | changes))


def test_a_staleness_function_gets_the_parameters_of_the_task() -> None:
    extensions.add("staleness_functions", "geometric", lambda staleness, base: base**staleness)
    function = Staleness("geometric", parameters=(("base", 0.5),))
    assert [staleness_weight(s, function) for s in range(4)] == [1, 0.5, 0.25, 0.125]
    require_methods(a_config(staleness=function))


def test_an_unknown_name_is_refused_with_what_the_operator_has_to_do() -> None:
    with pytest.raises(ConfigError, match="no staleness function 'elsewhere'") as caught:
        require_methods(a_config(staleness=Staleness("elsewhere")))
    assert 'extensions = ["staleness_functions:elsewhere"]' in caught.value.hint


@pytest.mark.parametrize("found", [1.5, -0.1, float("nan"), float("inf"), "much"])
def test_a_function_that_returns_no_factor_is_refused(found: Any) -> None:
    """Also if it does so only for a staleness that is rare."""
    extensions.add(
        "staleness_functions", "broken", lambda staleness: found if staleness == 7 else 1
    )
    config = a_config(staleness=Staleness("broken"), regime=AsyncFL(2, max_staleness=9))
    with pytest.raises(ConfigError, match="broken"):
        require_methods(config)


def test_parameters_that_the_function_does_not_have_are_refused() -> None:
    extensions.add("staleness_functions", "plain", lambda staleness: 1.0)
    with pytest.raises(ConfigError, match="plain") as caught:
        require_methods(a_config(staleness=Staleness("plain", parameters=(("x", 1.0),))))
    assert "{'x': 1.0}" in caught.value.hint


def test_a_misspelt_name_of_papaya_is_recognised() -> None:
    with pytest.raises(ConfigError) as caught:
        require_methods(a_config(optimizer=OptimizerConfig(kind="fedadm")))
    assert caught.value.hint.startswith("did you mean fedadam? otherwise, ")


class Signs(ServerOptimizer):
    """With one number of its own, and a state of three vectors."""

    @property
    def initial_moments(self) -> tuple[float, ...]:
        return (0.0, 1.0, 2.0)

    def move(
        self, steps: int, step: Tensor, moments: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        first, second, third = moments
        change = self.rate * self.parameters["by"] * np.sign(step)
        return change, (first + change, second * 2, third + steps)


def an_optimizer(kind: str, made: Any, **parameters: float) -> OptimizerConfig:
    extensions.add("server_optimizers", kind, made)
    return OptimizerConfig(kind=kind, rate=0.5, parameters=tuple(parameters.items()))


def test_a_server_optimizer_gets_its_parameters_and_keeps_its_state() -> None:
    optimizer = server_optimizer(an_optimizer("signs", Signs, by=4.0))
    parameters, step = np.zeros(3, np.float32), np.array([7, -7, 0], np.float32)
    state = optimizer.initial_state(3)
    for steps in (1, 2):
        parameters, state = optimizer.step(parameters, step, state)
        state = optimizer.decode_state(optimizer.encode_state(state), 3)
        assert state.steps == steps
    assert parameters.tolist() == [4, -4, 0]
    assert [moment.tolist() for moment in state.moments] == [[4, -4, 0], [4, 4, 4], [5, 5, 5]]


def test_state_of_another_optimizer_is_refused() -> None:
    adam = server_optimizer(OptimizerConfig())
    found = adam.encode_state(adam.initial_state(3))
    with pytest.raises(ProtocolError):
        server_optimizer(an_optimizer("signs", Signs, by=1.0)).decode_state(found, 3)


class Crooked(Signs):
    def move(self, steps: int, step: Tensor, moments: tuple[Tensor, ...]) -> Any:
        if self.parameters["how"] == 0:
            raise ZeroDivisionError
        return step, moments[:1]


@pytest.mark.parametrize("how", [0, 1])
def test_an_optimizer_that_fails_is_the_operators_problem(how: float) -> None:
    optimizer = server_optimizer(an_optimizer("crooked", Crooked, how=how))
    vector = np.ones(2, np.float32)
    with pytest.raises(OperatorError, match="the server optimizer crooked failed"):
        optimizer.step(vector, vector, optimizer.initial_state(2))


class Normalised(Signs):
    """Needs the whole vector, so it overrides `change`."""

    def change(
        self, steps: int, parameters: Vector, step: Vector, moments: tuple[Vector, ...]
    ) -> tuple[Vector, tuple[Vector, ...]]:
        return parameters + step / np.linalg.norm(step), moments


def test_an_optimizer_may_look_at_the_whole_vector() -> None:
    optimizer = server_optimizer(an_optimizer("normalised", Normalised, by=1.0))
    step = np.array([3, 4], np.float32)
    found, _ = optimizer.step(np.zeros(2, np.float32), step, optimizer.initial_state(2))
    assert found.tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("made", [lambda config: object(), dict, 3])
def test_what_is_no_optimizer_is_refused(made: Any) -> None:
    with pytest.raises(ConfigError, match="nothing cannot be made"):
        server_optimizer(an_optimizer("nothing", made))


# Entry points: packages that are installed beside Papaya.


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages on the path."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install(folder: Path, name: str, code: str, *entries: str) -> None:
    (folder / f"{name}.py").write_text(code)
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("\n".join(entries) + "\n")


STALENESS = "[papaya.staleness_functions]"


def test_an_entry_point_is_loaded_by_its_name(package: Path) -> None:
    code = "def steep(staleness, base):\n    return base ** staleness\n"
    install(package, "papaya_steep", code, STALENESS, "steep = papaya_steep:steep")
    config = a_config(staleness=Staleness("steep", parameters=(("base", 0.1),)))
    with pytest.raises(ConfigError, match="no staleness function 'steep'"):
        require_methods(config)  # installed is not enough: somebody has to allow it
    load(parsed(["staleness_functions:steep"]))
    require_methods(config)
    assert staleness_weight(2, config.staleness) == pytest.approx(0.01)


def test_a_simulation_loads_what_its_task_names(package: Path) -> None:
    code = "def flat(staleness):\n    return 0.5\n"
    install(package, "papaya_flat", code, STALENESS, "flat = papaya_flat:flat")
    load_used(a_config(staleness=Staleness("flat")))
    assert staleness_weight(2, Staleness("flat")) == 0.5
    (package / "papaya_flat.py").unlink()
    load_used(a_config(staleness=Staleness("flat")))  # it is known already


def test_a_kind_that_is_not_installed_is_named_with_its_field() -> None:
    with pytest.raises(
        ConfigError, match=r"optimizer\.kind = 'fedadm': is not one of fed"
    ) as error:
        load_used(a_config(optimizer=OptimizerConfig(kind="fedadm")))
    assert error.value.hint.startswith("did you mean fedadam?")


def test_an_entry_point_that_cannot_be_loaded_is_named(package: Path) -> None:
    install(package, "papaya_broken", "import nowhere_at_all", STALENESS, "gone = papaya_broken:x")
    with pytest.raises(OperatorError, match="staleness_functions:gone cannot be imported"):
        load([("staleness_functions", "gone")])
    with pytest.raises(OperatorError, match=r"absent of the group .* is not installed"):
        load([("aggregation_rules", "absent")])
    install(package, "papaya_again", "x = 1", STALENESS, "gone = papaya_again:x")
    with pytest.raises(OperatorError, match="installed more than once"):
        load([("staleness_functions", "gone")])
