"""Checks what no linter knows: who may import whom, and what a machine may not touch.

The tables below are the architecture; the code under them only reads them. Run by `make check` as
`python tools/architecture.py [root]`: prints `file:line: what is wrong; what to do`, exits 1 if
there is anything to print. It reads sources with the standard library and never imports them. It
judges by what one file says about itself, and does not follow types from file to file.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# --- Rule 1: imports point one way -------------------------------------------------------------
# package -> the packages of papaya that it may import, besides itself.

GROUND = ("errors", "config", "messages", "machine")
MACHINES = ("coordinator", "selector", "aggregator", "client")
SECURITY = ("attestation", "secagg", "verifiable_log")
DRIVERS = ("device", "server", "sim", "study")
BESIDE = ("learning", "store", "attestation", "secagg", "tsa", "verifiable_log")
BELOW_DRIVERS = (*GROUND, *MACHINES, *BESIDE)

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "__init__": (),
    "errors": (),
    "config": ("errors", "secagg"),
    "messages": ("errors", "config"),
    "machine": ("errors", "config", "messages"),
    # Apart from the protocol.
    "secagg": (),
    "verifiable_log": (),
    "tsa": ("secagg",),
    "attestation": ("errors", "config", "messages", "verifiable_log"),
    "learning": ("errors", "config"),
    "store": ("errors", "config", "messages"),
    # The machines know each other by messages only.
    "coordinator": GROUND,
    "selector": GROUND,
    "aggregator": (*GROUND, "learning", "secagg", "tsa"),
    "client": GROUND,
    # Used by several drivers.
    "http": (),
    "clock": (),
    "credentials": ("errors", "config", "store"),
    # Drivers of the same machines.
    "device": (*GROUND, "client", "learning", *SECURITY, "clock", "credentials"),
    "server": (*BELOW_DRIVERS, "http", "clock", "credentials"),
    "sim": BELOW_DRIVERS,
    "study": (*BELOW_DRIVERS, "sim", "device"),
    "cli": (*BELOW_DRIVERS, *DRIVERS, "http", "clock", "credentials"),
    "__main__": ("cli",),
}

# folder -> the only packages from outside that it may import, besides the standard library; the
# longest matching folder counts. What an enclave measures stays visible from `ls`.
THIRD_PARTY: dict[str, tuple[str, ...]] = {
    "papaya/secagg": ("numpy", "cryptography"),
    "papaya/tsa": ("numpy", "cryptography"),
    "papaya/verifiable_log": ("numpy", "cryptography"),
    "papaya/learning": ("msgspec", "numpy", "numba", "safetensors"),
    "papaya/learning/torch": ("msgspec", "numpy", "torch"),
}

# --- Rule 2: machines are pure -----------------------------------------------------------------

PURE = ("messages", "machine", *MACHINES)

CLOCK = "take `now` as an argument"
DRAW = "draw from the Random or the entropy that is an argument"
EFFECT = "return an effect and let the driver act"
UNSTABLE = "it differs from process to process: use a value that does not, such as a digest"

IMPURE_IMPORTS = {
    "time": CLOCK,
    "datetime": CLOCK,
    "random": "only `from random import Random` is allowed",
    "numpy.random": DRAW,
    "secrets": DRAW,
    "uuid": DRAW,
    "asyncio": EFFECT,
    "concurrent": EFFECT,
    "io": EFFECT,
    "logging": EFFECT,
    "multiprocessing": EFFECT,
    "os": EFFECT,
    "pathlib": EFFECT,
    "socket": EFFECT,
    "sqlite3": EFFECT,
    "subprocess": EFFECT,
    "threading": EFFECT,
}
IMPURE_CALLS = {
    "open": EFFECT,
    "print": EFFECT,
    "input": EFFECT,
    "hash": UNSTABLE,
    "id": UNSTABLE,
}
IMPURE_METHODS = {"generate": "make keys from drawn bytes: from_private_bytes(entropy(32))"}
SET_ORDER = "loop over sorted(...), or keep a dict or a tuple"


class Violation(NamedTuple):
    """One broken rule, in the order in which it is printed."""

    file: str
    line: int
    rule: str
    wrong: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.wrong}; {self.remedy} [{self.rule}]"


class Source(NamedTuple):
    """A parsed module: `file` is relative to the root, `package` is the name in MAY_IMPORT."""

    file: str
    package: str
    tree: ast.Module

    def violation(self, line: int, rule: str, wrong: str, remedy: str) -> Violation:
        return Violation(self.file, line, rule, wrong, remedy)


def check(root: Path) -> list[Violation]:
    """Every violation under `root`."""
    return sorted(set(_all_violations(root)))


def _all_violations(root: Path) -> Iterator[Violation]:
    for path in sorted((root / "papaya").rglob("*.py")):
        yield from _package_violations(
            path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        )


def _package_violations(file: str, text: str) -> Iterator[Violation]:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield Violation(file, error.lineno or 1, "syntax", f"not Python: {error.msg}", "mend it")
        return
    source = Source(file, file.split("/")[1].removesuffix(".py"), tree)
    if not ast.get_docstring(tree):
        remedy = "say what it is, where in the paper it is from and what it refuses to do"
        yield source.violation(1, "docstring", "no module docstring", remedy)
    yield from _import_violations(source)
    if source.package in PURE:
        yield from _purity_violations(source)


def imports_of(source: Source) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported, anywhere in the file."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = source.file.split("/")[: -node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def _import_violations(source: Source) -> Iterator[Violation]:
    if source.package not in MAY_IMPORT:
        remedy = "give it a row in MAY_IMPORT of tools/architecture.py"
        yield source.violation(1, "imports", f"`{source.package}` has no place", remedy)
        return
    allowed = MAY_IMPORT[source.package]
    outside = _third_party_allowed(source.file)
    for line, name in imports_of(source):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == "papaya":
            if target in MAY_IMPORT and target not in (source.package, *allowed):
                wrong = f"`{source.package}` imports `{target}`"
                remedy = f"it may import {', '.join(allowed) or 'nothing of papaya'}: move the code"
                yield source.violation(line, "imports", wrong, remedy)
        elif outside is not None and top not in outside and top not in sys.stdlib_module_names:
            wrong = f"imports `{top}`"
            remedy = f"only {', '.join(outside)} and the standard library belong here"
            yield source.violation(line, "third-party", wrong, remedy)


def _third_party_allowed(file: str) -> tuple[str, ...] | None:
    folders = [folder for folder in THIRD_PARTY if file.startswith(f"{folder}/")]
    return THIRD_PARTY[max(folders, key=len)] if folders else None


def _purity_violations(source: Source) -> Iterator[Violation]:
    for line, name in imports_of(source):
        parts = name.split(".")
        for impure in (parts[0], ".".join(parts[:2])):
            if impure in IMPURE_IMPORTS and name != "random.Random":
                remedy = IMPURE_IMPORTS[impure]
                yield source.violation(line, "purity", f"a machine imports `{name}`", remedy)
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in IMPURE_CALLS:
                wrong, remedy = f"a machine calls `{name}()`", IMPURE_CALLS[name]
            case ast.Call(func=ast.Attribute(attr=name)) if name in IMPURE_METHODS:
                wrong, remedy = f"a machine calls `.{name}()`", IMPURE_METHODS[name]
            case ast.Attribute(value=ast.Name(id="np" | "numpy"), attr="random"):
                wrong, remedy = "a machine uses `numpy.random`", IMPURE_IMPORTS["numpy.random"]
            case _:
                continue
        yield source.violation(node.lineno, "purity", wrong, remedy)
    for line in SetOrder(source.tree).lines:
        yield source.violation(line, "set-order", "the order of a set leaks out", SET_ORDER)


# --- Sets: what a name is, as far as this file says ---------------------------------------------
# A kind is "set", "sets" (a container of sets), "view" (of a dictionary: ordered by itself, but a
# set as soon as two are combined) or "" (anything else, or unknown).

SET_TYPES = {"set", "frozenset", "Set", "FrozenSet", "AbstractSet", "MutableSet"}
CONTAINERS = {"dict", "defaultdict", "Mapping", "MutableMapping", "list", "tuple", "Sequence"}
QUALIFIERS = {"Final", "ClassVar", "Annotated", "Optional"}
ORDER_TAKERS = {"list", "tuple", "iter", "enumerate", "zip", "map", "filter", "join", "fromkeys"}
SAME_KIND_METHODS = {"union", "intersection", "difference", "copy"}


def annotated_kind(annotation: ast.expr | None) -> str:
    """The kind that an annotation declares."""
    match annotation:
        case ast.Constant(value=str(text)):
            return annotated_kind(ast.parse(text, mode="eval").body)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return annotated_kind(left) or annotated_kind(right)
        case ast.Subscript(value=ast.Name(id=head) | ast.Attribute(attr=head), slice=inner):
            items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if head in QUALIFIERS:
                return annotated_kind(items[0])
            if head in CONTAINERS:
                return "sets" if "set" in map(annotated_kind, items) else ""
            return "set" if head in SET_TYPES else ""
        case ast.Name(id=head) | ast.Attribute(attr=head):
            return "set" if head in SET_TYPES else ""
    return ""


def iterated_by(node: ast.AST) -> list[ast.expr]:
    """The expressions whose order this node makes visible."""
    match node:
        case ast.For(iter=iterated) | ast.comprehension(iter=iterated):
            return [iterated]
        case ast.Starred(value=iterated) | ast.YieldFrom(value=iterated):
            return [iterated]
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=arguments) if (
            name in ORDER_TAKERS
        ):
            return arguments
        case ast.Call(func=ast.Attribute(value=popped, attr="pop"), args=[]):
            return [popped]
    return []


class SetOrder(ast.NodeVisitor):
    """The lines of one module where the order of a set becomes visible.

    Names live in scopes and are followed in the order of the source. Attributes are known by name
    for the whole file: `x.members` is a set if any class of the file declares `members` as one.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.lines: list[int] = []
        self._scopes: list[dict[str, str]] = [{}]
        self._attributes: dict[str, str] = {}
        self._functions: dict[str, str] = {}
        for node in ast.walk(tree):
            self._declare(node)
        self.visit(tree)

    def _declare(self, node: ast.AST) -> None:
        match node:
            case ast.ClassDef(body=body):
                for field in body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        self._declare_attribute(field.target.id, annotated_kind(field.annotation))
            case ast.AnnAssign(target=ast.Attribute(attr=name), annotation=annotation):
                self._declare_attribute(name, annotated_kind(annotation))
            case ast.Assign(targets=[ast.Attribute(attr=name)], value=value):
                self._declare_attribute(name, self._kind(value))
            case ast.FunctionDef(name=name, returns=returns):
                self._functions[name] = self._functions.get(name) or annotated_kind(returns)
                if any(isinstance(d, ast.Name) and "property" in d.id for d in node.decorator_list):
                    self._declare_attribute(name, annotated_kind(returns))

    def _declare_attribute(self, name: str, kind: str) -> None:
        self._attributes[name] = self._attributes.get(name) or kind

    def visit(self, node: ast.AST) -> None:
        self.lines += [used.lineno for used in iterated_by(node) if self._kind(used) == "set"]
        match node:
            case ast.FunctionDef(args=signature):
                arguments = (*signature.posonlyargs, *signature.args, *signature.kwonlyargs)
                self._scopes.append({a.arg: annotated_kind(a.annotation) for a in arguments})
                self.generic_visit(node)
                self._scopes.pop()
                return
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                self._bind_item(target, value)
            case ast.AnnAssign(target=target, annotation=annotation):
                self._bind(target, annotated_kind(annotation))
        self.generic_visit(node)
        match node:  # These see their right side before they change their left side.
            case ast.Assign(targets=[target], value=value):
                self._bind(target, self._kind(value))
            case ast.NamedExpr(target=target, value=value):
                self._bind(target, self._kind(value))

    def _bind(self, target: ast.expr, kind: str) -> None:
        if isinstance(target, ast.Name):
            self._scopes[-1][target.id] = kind

    def _bind_item(self, target: ast.expr, iterated: ast.expr) -> None:
        match iterated:
            case ast.Call(func=ast.Attribute(value=container, attr="values" | "items")):
                item = target.elts[-1] if isinstance(target, ast.Tuple) else target
                self._bind(item, "set" if self._kind(container) == "sets" else "")
            case _:
                self._bind(target, "")

    def _kind(self, node: ast.expr) -> str:
        match node:
            case ast.Set() | ast.SetComp():
                return "set"
            case ast.Name(id=name):
                return next((scope[name] for scope in self._scopes[::-1] if name in scope), "")
            case ast.Attribute(attr=name):
                return self._attributes.get(name, "")
            case ast.Subscript(value=value):
                return "set" if self._kind(value) == "sets" else ""
            case ast.BinOp(left=a, op=ast.BitOr() | ast.BitAnd() | ast.Sub() | ast.BitXor()):
                kinds = (self._kind(a), self._kind(node.right))
                return "set" if "set" in kinds or "view" in kinds else ""
            case ast.IfExp(body=a, orelse=b) | ast.BoolOp(values=[a, b]):
                return self._kind(a) or self._kind(b)
            case ast.NamedExpr(value=value):
                return self._kind(value)
            case ast.Call(func=func):
                return self._call_kind(func)
        return ""

    def _call_kind(self, func: ast.expr) -> str:
        match func:
            case ast.Name(id="set" | "frozenset"):
                return "set"
            case ast.Attribute(value=value, attr="get" | "setdefault" | "pop"):
                return "set" if self._kind(value) == "sets" else ""
            case ast.Attribute(attr="keys" | "items"):
                return "view"
            case ast.Attribute(value=value, attr=name) if name in SAME_KIND_METHODS:
                return self._kind(value)
            case ast.Name(id=name) | ast.Attribute(attr=name):
                return self._functions.get(name, "")
        return ""


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    violations = check(root)
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
