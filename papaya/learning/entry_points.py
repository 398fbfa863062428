"""Extensions that are installed as Python entry points.

A package declares them in its pyproject.toml:

    [project.entry-points."papaya.server_optimizers"]
    lamb = "my_package.optimizers:Lamb"

Servers load those that the operator has allowed (`extensions` in the server's file). A simulation
loads those that its task names: whoever runs it has installed them. Refused (OperatorError): one
that is not installed, installed twice, or fails while it is imported. If a task names it, the error
names the field.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from papaya.config import TaskConfig
from papaya.errors import OperatorError
from papaya.learning import extensions
from papaya.learning.extensions import GROUPS, ExtensionGroup

PREFIX: Final = "papaya."


def load(wanted: Iterable[tuple[ExtensionGroup, str]]) -> None:
    """Import these extensions and make them known to this process."""
    for group, name in wanted:
        found = _declared(group, name)
        if len(found) != 1:
            what = "installed more than once" if found else "not installed"
            raise OperatorError(
                f"the entry point {name} of the group {PREFIX}{group} is {what}",
                hint=f"{extensions.meant(group, name)}install one package that declares it, in the "
                "environment of Papaya",
            )
        try:
            extension = found[0].load()
        except Exception as error:
            raise OperatorError(
                f"the entry point {PREFIX}{group}:{name} cannot be imported: {error!r}",
                hint=f"try: python -c 'import {found[0].module}'",
            ) from error
        extensions.add(group, name, extension)


def load_used(config: TaskConfig) -> None:
    """Load what the task names and this process does not have yet."""
    for group, name in extensions.used_by(config):
        if not extensions.has(group, name):
            if not _declared(group, name):
                raise extensions.unknown_kind(group, name)
            load([(group, name)])


def _declared(group: ExtensionGroup, name: str) -> list[EntryPoint]:
    return [each for each in entry_points(group=PREFIX + group) if each.name == name]


def parsed(names: Iterable[str]) -> list[tuple[ExtensionGroup, str]]:
    """`group:name` of each extension in a server's file, which has checked them."""
    found = []
    for text in names:
        group, _, name = text.partition(":")
        found += [(known, name) for known in GROUPS if known == group]
    return found
