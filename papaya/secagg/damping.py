"""How much a stale update counts: a factor from 0 to 1 that falls with the staleness s.

    polynomial  (1 + s) ** -exponent; with 0.5 the paper's 1 / sqrt(1 + s), which is the default
    hinge       1 up to `grace`, then 1 / (1 + slope * (s - grace))
    constant    1

Paper, appendix "Handling Staleness"; hinge and polynomial: Xie et al., "Asynchronous Federated
Optimization". Under secure aggregation the device damps its own update, so the function is one of
the public parameters. Refused (ParametersError): any other function, and parameters out of bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from papaya.secagg.errors import ParametersError

MAX_EXPONENT: Final = 8.0
MAX_SLOPE: Final = 1e6
MAX_GRACE: Final = 2**31
_PARAMETERS: Final = {
    "polynomial": ("exponent",),
    "hinge": ("slope", "grace"),
    "constant": (),
}
KINDS: Final = tuple(_PARAMETERS)


@dataclass(frozen=True, slots=True)
class Damping:
    """One of these functions. The parameters of the other functions are 0, so that equal functions
    are equal objects.
    """

    kind: str = "polynomial"
    exponent: float = 0.5
    slope: float = 0.0
    grace: int = 0

    def __post_init__(self) -> None:
        _require("kind", self.kind, self.kind in KINDS, " or ".join(KINDS))
        for name, value, kind, most in (
            ("exponent", self.exponent, float, MAX_EXPONENT),
            ("slope", self.slope, float, MAX_SLOPE),
            ("grace", self.grace, int, MAX_GRACE),
        ):
            known = type(value) is kind and 0 <= value <= most
            _require(name, value, known, f"{kind.__name__} from 0 to {most:g}")
        for name in ("exponent", "slope", "grace"):
            value = getattr(self, name)
            unused = name not in _PARAMETERS[self.kind]
            _require(name, value, not unused or value == 0, f"0 in a {self.kind} function")

    def factor(self, staleness: int) -> float:
        if self.kind == "constant":
            return 1.0
        if self.kind == "hinge":
            return 1.0 / (1.0 + self.slope * max(0, staleness - self.grace))
        if self.exponent == 0.5:
            return 1.0 / math.sqrt(1.0 + staleness)
        return math.pow(1.0 + staleness, -self.exponent)

    def encoded(self) -> dict[str, Any]:
        """For an encoding of public parameters: without the parameters of other functions."""
        found = {name: getattr(self, name) for name in _PARAMETERS[self.kind]}
        return {"kind": self.kind} | found

    @classmethod
    def decoded(cls, found: object) -> Damping:
        """From untrusted JSON. The caller compares the encoding again."""
        if not isinstance(found, dict) or found.get("kind") not in KINDS:
            raise ParametersError("damping", f"damping: not one of {', '.join(KINDS)}")
        names = _PARAMETERS[found["kind"]]
        if sorted(found) != sorted(("kind", *names)):
            raise ParametersError("damping", f"damping: {found['kind']} needs {names}")
        given: dict[str, Any] = {"exponent": 0.0} | found
        return cls(**given)


def _require(field: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        message = f"damping.{field} = {str(value)[:80]!r}: {wanted}"
        raise ParametersError(f"damping.{field}", message)


PAPERS: Final = Damping()
