"""Papaya: practical, private and scalable federated learning, asynchronous and synchronous.

An open implementation of PAPAYA (Huba et al., MLSys 2022). `docs/glossary.md` maps each noun
of the paper to the file that holds it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from papaya.study.notebook import simulate, sweep

__all__ = ["__version__", "simulate", "sweep"]
__version__ = "0.5.0.dev0"


def __getattr__(name: str) -> Any:
    """`papaya.simulate` and `papaya.sweep`, imported when they are used."""
    if name == "simulate":
        from papaya.study.notebook import simulate

        return simulate
    if name == "sweep":
        from papaya.study.notebook import sweep

        return sweep
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
