"""Checks what no linter knows: who may import whom, and that the machines are pure.

The tables below are the architecture; the code under them only reads them. Run by `make check` as
`python -m tools.architecture [root]`: prints `file:line: what is wrong; what to do`, exits 1 if
there is anything to print. It reads sources with the standard library and never imports them.

Imports and unique names are checked here, purity in `tools/purity.py`. `tools/sources.py` reads the
files.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.purity import Purity
from tools.sources import Source, Violation, parsed

# --- Rule 1: imports point one way -------------------------------------------------------------
# package -> the packages of papaya that it may import, besides itself.

GROUND = ("errors", "config", "messages", "machine")
MACHINES = ("coordinator", "selector", "aggregator", "client")
SECURITY = ("attestation", "secagg", "privacy", "verifiable_log")
DRIVERS = ("device", "server", "sim", "study")
BESIDE = ("learning", "store", "attestation", "secagg", "privacy", "tsa", "verifiable_log")
BELOW_DRIVERS = (*GROUND, *MACHINES, *BESIDE)

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "__init__": (),
    "errors": (),
    "config": ("errors", "secagg", "privacy"),
    "messages": ("errors", "config"),
    "machine": ("errors", "config", "messages"),
    # Apart from the protocol.
    "secagg": (),
    "privacy": (),
    "verifiable_log": (),
    "tsa": ("secagg",),
    "attestation": ("errors", "config", "messages", "verifiable_log"),
    "learning": ("errors", "config"),
    "bundle": ("errors", "config", "learning"),
    "store": ("errors", "config", "messages"),
    # The machines know each other by messages only.
    "coordinator": GROUND,
    "selector": GROUND,
    "aggregator": (*GROUND, "learning", "secagg", "tsa"),
    "client": GROUND,
    # Used by several drivers.
    "http": (),
    "clock": (),
    "progress": ("errors",),
    "credentials": ("errors", "config", "store"),
    # Drivers of the same machines.
    "device": (*GROUND, "client", "learning", "bundle", *SECURITY, "clock", "credentials"),
    "server": (*BELOW_DRIVERS, "bundle", "http", "clock", "credentials"),
    "sim": BELOW_DRIVERS,
    "study": (*BELOW_DRIVERS, "sim", "device", "progress"),
    # Tests clients of others: a real server behind a gateway.
    "conformance": (*BELOW_DRIVERS, "server"),
    "cli": (
        *BELOW_DRIVERS,
        *DRIVERS,
        "bundle",
        "conformance",
        "http",
        "clock",
        "progress",
        "credentials",
    ),
    "__main__": ("cli",),
}

# What `papaya` offers to its users -> what it stands for. `papaya/__init__.py` imports it when it
# is used, so it runs for nobody else; whoever names it imports the package below.
OFFERS: dict[str, str] = {
    "papaya.simulate": "papaya.study.notebook.simulate",
    "papaya.sweep": "papaya.study.notebook.sweep",
}

# folder -> the only packages from outside that it may import, besides the standard library; the
# longest matching folder counts. What an enclave measures stays visible from `ls`.
THIRD_PARTY: dict[str, tuple[str, ...]] = {
    "papaya/secagg": ("numpy", "cryptography"),
    "papaya/tsa": ("numpy", "cryptography"),
    "papaya/verifiable_log": ("numpy", "cryptography"),
    "papaya/learning": ("msgspec", "numpy", "numba", "safetensors"),
    "papaya/learning/executorch": ("msgspec", "numpy"),
    "papaya/learning/torch": ("msgspec", "numpy", "torch", "executorch"),
}

# --- Rule 2: the machines are pure --------------------------------------------------------------
# The rule holds for these packages and for every file of papaya that they import, directly or not.

PURE = (*GROUND, *MACHINES)

# --- Rule 3: one name for one thing -------------------------------------------------------------

CAMEL_CASE = re.compile(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")
TYPE_VARIABLES = {"TypeVar", "ParamSpec", "TypeVarTuple"}


def check(root: Path) -> list[Violation]:
    """Every violation under `root`."""
    return sorted(set(_all_violations(root)))


def _all_violations(root: Path) -> Iterator[Violation]:
    sources: list[Source] = []
    for path in sorted((root / "papaya").rglob("*.py")):
        file = path.relative_to(root).as_posix()
        try:
            sources.append(parsed(file, path.read_text(encoding="utf-8")))
        except SyntaxError as error:
            line, wrong = error.lineno or 1, f"invalid syntax: {error.msg}"
            yield Violation(file, line, "syntax", wrong, "correct it")
    for source in sources:
        yield from _docstring_violations(source)
        yield from _import_violations(source)
    yield from Purity(sources, PURE, _is_followed).violations()
    yield from name_violations(sources)


def _docstring_violations(source: Source) -> Iterator[Violation]:
    if not ast.get_docstring(source.tree):
        remedy = "say what it does, which section of the paper it implements and what it refuses"
        yield source.violation(1, "docstring", "no module docstring", remedy)


def _import_violations(source: Source) -> Iterator[Violation]:
    if source.package not in MAY_IMPORT:
        wrong = f"`{source.package}` has no row in MAY_IMPORT"
        remedy = "add one to tools/architecture.py"
        yield source.violation(1, "imports", wrong, remedy)
        return
    outside = _third_party_allowed(source.file)
    for line, name in source.names.dependencies():
        name = OFFERS.get(name, name)
        top = name.partition(".")[0]
        if top == "papaya" and not is_offered(source.module, name):
            if not may_import(source.package, name):
                allowed = ", ".join(MAY_IMPORT[source.package]) or "nothing of papaya"
                wrong = f"`{source.package}` imports `{_package_of(name)}`"
                yield source.violation(
                    line, "imports", wrong, f"it may import {allowed}: move the code"
                )
        elif outside is not None and top not in outside and top not in sys.stdlib_module_names:
            wrong = f"imports `{top}`"
            remedy = f"import only {', '.join(outside)} and the standard library here"
            yield source.violation(line, "third-party", wrong, remedy)


def _package_of(name: str) -> str:
    return f"{name}.".split(".")[1]


def may_import(package: str, name: str) -> bool:
    """True if MAY_IMPORT lets `package` import `name`, a dotted name that starts with papaya."""
    target = _package_of(name)
    return target not in MAY_IMPORT or target in (package, *MAY_IMPORT.get(package, ()))


def is_offered(module: str, name: str) -> bool:
    """True for what `papaya/__init__.py` imports for users of the package."""
    return module == "papaya" and name in OFFERS.values()


def _is_followed(source: Source, name: str) -> bool:
    """Refused imports are reported once, and not followed."""
    return not is_offered(source.module, name) and may_import(source.package, name)


def _third_party_allowed(file: str) -> tuple[str, ...] | None:
    folders = [folder for folder in THIRD_PARTY if file.startswith(f"{folder}/")]
    return THIRD_PARTY[max(folders, key=len)] if folders else None


# --- Unique names -------------------------------------------------------------------------------


def name_violations(sources: Iterable[Source]) -> Iterator[Violation]:
    """Public classes and type aliases whose name another file has already used."""
    places: dict[str, Source] = {}
    lines: dict[str, int] = {}
    for source in sources:
        for name, line in _public_types(source.tree.body).items():
            if name in places:
                wrong = f"`{name}` is also defined at {places[name].file}:{lines[name]}"
                yield source.violation(line, "names", wrong, "rename one of the two")
            else:
                places[name], lines[name] = source, line


def _public_types(body: Iterable[ast.stmt]) -> dict[str, int]:
    """The public classes and type aliases of a module, with their lines."""
    found: dict[str, int] = {}
    for node in body:
        match node:
            case ast.ClassDef(name=name) if not name.startswith("_"):
                found.setdefault(name, node.lineno)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                if CAMEL_CASE.fullmatch(name) and not _is_type_variable(node.value):
                    found.setdefault(name, node.lineno)
            case ast.If(body=inner, orelse=other) | ast.Try(body=inner, orelse=other):
                handlers = node.handlers if isinstance(node, ast.Try) else []
                blocks = (inner, other, *(handler.body for handler in handlers))
                for block in blocks:
                    found = {**_public_types(block), **found}
    return found


def _is_type_variable(value: ast.expr | None) -> bool:
    match value:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in TYPE_VARIABLES
    return False


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    violations = check(root)
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
