"""The error tree: the class says whose fault it is, the message what, the hint what to do."""

from __future__ import annotations

import pickle
from traceback import format_exception

import pytest

from papaya import errors
from papaya.errors import (
    ConfigError,
    InvariantError,
    OperatorError,
    PapayaError,
    ProtocolError,
    TicketError,
    UpdateRefused,
)

ALL = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, PapayaError)
]


@pytest.mark.parametrize(
    ("error", "parent", "exit_code"),
    [
        (OperatorError, PapayaError, 2),
        (ConfigError, OperatorError, 2),
        (ProtocolError, PapayaError, 3),
        (TicketError, ProtocolError, 3),
        (UpdateRefused, ProtocolError, 3),
        (InvariantError, PapayaError, 70),
    ],
)
def test_the_class_says_whose_fault_it_is(
    error: type[PapayaError], parent: type[PapayaError], exit_code: int
) -> None:
    assert error.__bases__ == (parent,)
    assert error.exit_code == exit_code


def test_a_fault_of_one_side_is_not_caught_as_that_of_another() -> None:
    """A server that answers its peer's mistakes must not swallow its own or its operator's."""
    sides = (OperatorError, ProtocolError, InvariantError)
    for error in ALL:
        assert sum(issubclass(error, side) for side in sides) == (error is not PapayaError)


def test_every_error_is_drawn_in_the_tree_of_the_docstring() -> None:
    assert errors.__doc__ is not None
    assert [error.__name__ for error in ALL if error.__name__ not in errors.__doc__] == []


def test_a_traceback_has_the_hint_once() -> None:
    error = pickle.loads(pickle.dumps(OperatorError("no key", hint="papaya owner key")))
    assert str(error) == "no key"
    assert "".join(format_exception(error)).count("hint: papaya owner key") == 1
    assert not hasattr(OperatorError("no key"), "__notes__")


def test_a_config_error_names_field_value_problem_and_remedy() -> None:
    error = ConfigError.of("clip", -1.5, "must be above zero", "leave clip out")
    assert str(error) == "clip = -1.5: must be above zero"
    assert error.hint == "leave clip out"


def test_a_value_is_quoted_so_that_an_empty_one_can_be_seen() -> None:
    assert str(ConfigError.of("task", "", "is empty", "name it")) == "task = '': is empty"


def test_an_error_without_a_hint_has_that_of_its_class() -> None:
    assert TicketError("expired").hint == "check in again: this session is over"
    assert "report it" in InvariantError("held 3, counted 2").hint
    assert ProtocolError("not a message").hint == ""


def test_a_given_hint_replaces_that_of_the_class() -> None:
    assert TicketError("expired", hint="wait").hint == "wait"
    assert TicketError("expired", hint="").hint == ""


def test_a_refused_update_says_why_in_a_word_that_can_be_counted() -> None:
    error = UpdateRefused("over_norm", "norm 12.5 is above the clip 10")
    assert (error.reason, str(error)) == ("over_norm", "norm 12.5 is above the clip 10")
