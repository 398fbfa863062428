"""Why the admin API refused, each with its HTTP status. Any other OperatorError is a 400."""

from __future__ import annotations

from typing import ClassVar

from papaya.errors import OperatorError


class AdminProblem(OperatorError):
    """A request that was understood and refused."""

    status: ClassVar[int] = 400


class NotFound(AdminProblem):
    """No such task, version or blob."""

    status = 404


class Conflict(AdminProblem):
    """It exists, it changed meanwhile, or it cannot come after the present state."""

    status = 409


class Uncertain(AdminProblem):
    """The store gave no answer: it may have been done, or may still be."""

    status = 503


class NoStorage(AdminProblem):
    """The disk is full or broken: nothing was kept, and nothing is wrong with the request."""

    status = 507
