"""Errors of the admin API with their HTTP status. Any other OperatorError is a 400."""

from __future__ import annotations

from typing import ClassVar

from papaya.errors import OperatorError


class AdminProblem(OperatorError):
    """A valid request that was refused."""

    status: ClassVar[int] = 400


class Forbidden(AdminProblem):
    """The caller's role does not allow it."""

    status = 403


class NotFound(AdminProblem):
    """No such task, version or blob."""

    status = 404


class Conflict(AdminProblem):
    """It exists already, it has changed, or the current state does not allow it."""

    status = 409


class Uncertain(AdminProblem):
    """The outcome is unknown: the change may or may not have been made."""

    status = 503


class NoStorage(AdminProblem):
    """The disk is full or broken. Nothing was stored; the request itself is fine."""

    status = 507
