"""Checks what no linter knows: who may import whom, and that the machines are pure.

The tables below are the architecture; the code under them only reads them. Run by `make check` as
`python tools/architecture.py [root]`: prints `file:line: what is wrong; what to do`, exits 1 if
there is anything to print. It reads sources with the standard library and never imports them.

Names are resolved to full dotted names (`np.random` is `numpy.random`), also through files that
import them from elsewhere. Types are not followed: what a method of an argument does is unknown.
"""

import ast
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

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

# Everything else from outside papaya is refused. An entry allows the name and all that is below
# it. A module above an entry may be imported (`import random`), but only its entries may be used.
ALLOWED: tuple[str, ...] = (
    *("__future__", "abc", "bisect", "collections", "dataclasses", "difflib", "enum", "heapq"),
    *("fractions", "itertools", "math", "re", "struct", "typing"),
    # Remembers results in memory, never on disk.
    "functools",
    # Digests of bytes. Neither makes keys nor reads entropy.
    *("hashlib", "hmac"),
    # Checksums of bytes; isal's crc32 is the same function, faster.
    *("zlib.crc32", "isal.isal_zlib.crc32"),
    # contextlib can also change the working directory and redirect stdout.
    *("contextlib.AbstractContextManager", "contextlib.ExitStack"),
    *("contextlib.nullcontext", "contextlib.suppress"),
    # On strings. load and dump work on files.
    *("json.dumps", "json.loads"),
    # Parses addresses; opens no socket.
    "ipaddress.ip_network",
    # A generator with its own seed. The functions of `random` share one seeded by the system.
    "random.Random",
    # Structs, and a parser of bytes.
    *("msgspec.Struct", "msgspec.Meta", "msgspec.field", "msgspec.convert", "msgspec.to_builtins"),
    *("msgspec.UNSET", "msgspec.UnsetType"),
    *("msgspec.MsgspecError", "msgspec.DecodeError", "msgspec.ValidationError"),
    *("msgspec.json", "msgspec.msgpack", "msgspec.structs"),
    # Arithmetic; see REFUSED for the rest.
    "numpy",
    # Compiles arithmetic. `cache=True` keeps machine code in a folder of numba's; it saves time
    # and changes no result.
    *("numba.njit", "numba.types.Array", "numba.types.float32", "numba.types.void"),
    # Exact decimals with a context of their own, not that of the process.
    *("decimal.Context", "decimal.Decimal"),
    # The keystream of a key that is an argument.
    "cryptography.hazmat.primitives.ciphers.Cipher",
    "cryptography.hazmat.primitives.ciphers.algorithms.AES128",
    "cryptography.hazmat.primitives.ciphers.modes.CTR",
    # Ed25519 signs without entropy (RFC 8032). Making a key needs it: see IMPURE_ATTRIBUTES.
    "cryptography.exceptions.InvalidSignature",
    "cryptography.hazmat.primitives.asymmetric.ed25519.Ed25519PrivateKey",
    "cryptography.hazmat.primitives.asymmetric.ed25519.Ed25519PublicKey",
)

# Exceptions to ALLOWED: the longest matching entry of the two tables counts.
REFUSED: tuple[str, ...] = (
    # Files and the console.
    *("numpy.fromfile", "numpy.fromregex", "numpy.genfromtxt", "numpy.load", "numpy.loadtxt"),
    *("numpy.memmap", "numpy.save", "numpy.savetxt", "numpy.savez", "numpy.savez_compressed"),
    *("numpy.info", "numpy.get_include", "numpy.show_config", "numpy.show_runtime", "numpy.test"),
    # Settings of the whole process. `with numpy.errstate(...)` is fine: it ends.
    *("numpy.set_printoptions", "numpy.setbufsize", "numpy.seterr", "numpy.seterrcall"),
    # Submodules with random numbers, files, or other modules in them; nothing here needs them.
    *("numpy.char", "numpy.core", "numpy.ctypeslib", "numpy.distutils", "numpy.emath"),
    *("numpy.f2py", "numpy.fft", "numpy.lib", "numpy.linalg", "numpy.ma", "numpy.matlib"),
    *("numpy.matrixlib", "numpy.polynomial", "numpy.random", "numpy.rec", "numpy.strings"),
    *("numpy.conftest", "numpy.testing"),
)

# Modules of the standard library that others contain: `dataclasses.sys`; `enum.bltns` is builtins.
REFUSED_MODULES = sys.stdlib_module_names.difference(ALLOWED) | {"bltns"}

CLOCK = "take `now` as an argument"
DRAW = "draw from the Random or the entropy that is an argument"
EFFECT = "return an effect and let the driver act"
UNSTABLE = "it differs from process to process: use a value that does not, such as a digest"
HIDDEN = "import and name what is used, so that it can be checked"
UNKNOWN = f"{EFFECT}, or add it to ALLOWED with the reason why it is pure"
SET_ORDER = "loop over sorted(...), or keep a dict or a tuple"

REMEDIES = {
    **dict.fromkeys(("time", "datetime"), CLOCK),
    **dict.fromkeys(("numpy.random", "random", "secrets", "uuid"), DRAW),
    **dict.fromkeys(("asyncio", "concurrent", "multiprocessing", "threading"), EFFECT),
    **dict.fromkeys(("io", "logging", "os", "pathlib", "select", "socket", "sqlite3"), EFFECT),
    **dict.fromkeys(("ssl", "subprocess", "tempfile", "urllib"), EFFECT),
    **dict.fromkeys(("builtins", "importlib", "sys"), HIDDEN),
}

# Builtins that no pure file may name, whether it calls them or hands them on.
IMPURE_BUILTINS = {
    **dict.fromkeys(("open", "print", "input", "breakpoint"), EFFECT),
    **dict.fromkeys(("help", "exit", "quit", "copyright", "credits", "license"), EFFECT),
    **dict.fromkeys(("hash", "id", "__file__", "__path__", "__cached__"), UNSTABLE),
    **dict.fromkeys(("eval", "exec", "compile", "globals", "locals", "vars"), HIDDEN),
    **dict.fromkeys(("__import__", "__build_class__", "__builtins__"), HIDDEN),
    **dict.fromkeys(("__loader__", "__spec__", "__package__"), HIDDEN),
}
# Attributes that no pure file may name, whatever they belong to.
IMPURE_ATTRIBUTES = {
    **dict.fromkeys(
        ("generate", "generate_key"), "make keys from drawn bytes: from_private_bytes(entropy(32))"
    ),
    **dict.fromkeys(("tofile", "dump"), EFFECT),
    **dict.fromkeys(("__builtins__", "__globals__", "__import__", "__code__"), HIDDEN),
    **dict.fromkeys(("__loader__", "__spec__", "__subclasses__", "__self__"), HIDDEN),
    "__getattribute__": HIDDEN,
}

RANDOM = "random.Random"

# --- Rule 3: one name for one thing -------------------------------------------------------------

CAMEL_CASE = re.compile(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")
TYPE_VARIABLES = {"TypeVar", "ParamSpec", "TypeVarTuple"}


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
    module: str
    package: str
    tree: ast.Module
    names: "Names"

    def violation(self, line: int, rule: str, wrong: str, remedy: str) -> Violation:
        return Violation(self.file, line, rule, wrong, remedy)


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
    yield from Purity(sources).violations()
    yield from name_violations(sources)


def parsed(file: str, text: str) -> Source:
    """The module of this file; raises SyntaxError."""
    tree = ast.parse(text)
    path = file.removesuffix(".py").split("/")
    module = ".".join(path[:-1] if path[-1] == "__init__" else path)
    return Source(file, module, path[1], tree, Names(file, tree))


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


def _third_party_allowed(file: str) -> tuple[str, ...] | None:
    folders = [folder for folder in THIRD_PARTY if file.startswith(f"{folder}/")]
    return THIRD_PARTY[max(folders, key=len)] if folders else None


# --- Purity -------------------------------------------------------------------------------------


def is_allowed(name: str) -> bool:
    """True if a pure file may use `name`, a full dotted name from outside papaya."""
    top, *below = name.split(".")
    if any(part.startswith("_") for part in below):
        return False
    if top in sys.stdlib_module_names and not REFUSED_MODULES.isdisjoint(below):
        return False
    return _longest_match(name, ALLOWED) > _longest_match(name, REFUSED)


def is_importable(name: str) -> bool:
    """True if a pure file may import `name`: it is allowed, or a module above what is allowed."""
    return is_allowed(name) or any(entry.startswith(f"{name}.") for entry in ALLOWED)


def _longest_match(name: str, entries: Iterable[str]) -> int:
    return max((len(e) for e in entries if name == e or name.startswith(f"{e}.")), default=0)


def _remedy(name: str) -> str:
    parts = name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((REMEDIES[prefix] for prefix in prefixes if prefix in REMEDIES), UNKNOWN)


class Purity:
    """The pure packages with everything of papaya that they import, and what is impure in them."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = {source.module: source for source in sources}
        plain = (source.names.modules for source in sources)
        self._modules = {*self._sources, *(name for names in plain for name in names)}
        # pure module -> the module that imports it, or "" if its package is in PURE
        self._importers = self._closure()

    def violations(self) -> Iterator[Violation]:
        for module, importer in self._importers.items():
            source = self._sources[module]
            path = f" in a file that `{self._importing(importer)}` imports" if importer else ""
            for line, wrong, remedy in self._impurities(source.names):
                yield source.violation(line, "purity", wrong + path, remedy)
            for line in SetOrder(source.tree).lines:
                wrong = "the order of a set becomes visible" + path
                yield source.violation(line, "set-order", wrong, SET_ORDER)

    def _importing(self, module: str) -> str:
        """The chain of imports from a pure package to `module`."""
        chain = [module]
        while importer := self._importers[chain[-1]]:
            chain.append(importer)
        return " -> ".join(reversed(chain))

    def _closure(self) -> dict[str, str]:
        importers = {m: "" for m, source in self._sources.items() if source.package in PURE}
        todo = deque(importers)
        while todo:
            module = todo.popleft()
            for target in self._imported_by(module):
                if target not in importers:
                    importers[target] = module
                    todo.append(target)
        return importers

    def _imported_by(self, module: str) -> Iterator[str]:
        """Modules that Python runs when it imports this one, except those that MAY_IMPORT refuses.

        Refused imports are reported by that rule; following them would only repeat it.
        """
        package = self._sources[module].package
        names = [name for _, name in self._sources[module].names.dependencies()]
        names = [name for name in names if not is_offered(module, name)]
        for name in (module, *(name for name in names if may_import(package, name))):
            parts = name.split(".")
            prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
            yield from (prefix for prefix in prefixes if prefix in self._sources)

    def _impurities(self, names: "Names") -> Iterator[tuple[int, str, str]]:
        yield from self._impure_imports(names)
        yield from self._impure_uses(names)
        for line, name in names.unbound:
            if name in IMPURE_BUILTINS:
                yield line, f"uses `{name}`", IMPURE_BUILTINS[name]
        for line, name in names.attributes:
            if name in IMPURE_ATTRIBUTES:
                yield line, f"uses `.{name}`", IMPURE_ATTRIBUTES[name]
        for line in names.unseeded:
            yield line, "uses `Random` without a seed", DRAW
        for line in names.seeded_by_the_system:
            yield line, "calls `.seed` without a seed, which takes one from the system", DRAW
        for line in names.computed:
            yield line, "uses `getattr` with a computed name on another object than `self`", HIDDEN

    def _impure_imports(self, names: "Names") -> Iterator[tuple[int, str, str]]:
        for line, name in names.imports:
            if name.endswith(".*"):
                yield line, f"imports `{name}`", HIDDEN
                continue
            for full in self._full_names(name):
                if not self._is_ours(full) and not is_importable(full):
                    yield line, f"imports `{full}`", _remedy(full)

    def _impure_uses(self, names: "Names") -> Iterator[tuple[int, str, str]]:
        def is_reported(imported: str) -> bool:
            return not self._is_ours(imported) and not is_importable(imported)

        for line, bound, name in names.uses:
            for full in self._full_names(name):
                if "." not in full or full in self._modules:
                    yield line, f"uses the module `{full}` as a value", HIDDEN
                elif not (self._is_ours(full) or is_allowed(full) or is_reported(bound)):
                    yield line, f"uses `{full}`", _remedy(full)

    @staticmethod
    def _is_ours(name: str) -> bool:
        return name.partition(".")[0] == "papaya"

    def _full_names(self, name: str, followed: frozenset[str] = frozenset()) -> Iterator[str]:
        """What `name` stands for: `papaya.x.np.random` is `numpy.random` if x imports numpy as np.

        Yields `name` too, and several others if x imports a name twice (`except ImportError`).
        """
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            source = self._sources.get(".".join(parts[:end]))
            if source is None or ".".join(parts[: end + 1]) in self._sources:
                continue
            for target in source.names.top_level.get(parts[end], ()):
                if target not in followed:
                    rest = ".".join([target, *parts[end + 1 :]])
                    yield from self._full_names(rest, followed | {target})
        yield name


# --- Names: what each one stands for ------------------------------------------------------------

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Scope(NamedTuple):
    """The names that one scope binds, with the dotted names of those that it imports.

    A name that a function binds hides what is outside. In a module or a class, only imports
    count: in `open = open` the right side is still the builtin.
    """

    is_class: bool
    names: Mapping[str, tuple[str, ...]]


class Names(ast.NodeVisitor):
    """The names that one file imports and uses, resolved to full dotted names."""

    def __init__(self, file: str, tree: ast.Module) -> None:
        self.imports: list[tuple[int, str]] = []  # also those by import_module("...")
        self.uses: list[tuple[int, str, str]] = []  # line, imported name, the same with attributes
        self.unbound: list[tuple[int, str]] = []  # builtins, and globals of this file
        self.attributes: list[tuple[int, str]] = []
        self.seeded_by_the_system: list[int] = []  # lines: `rng.seed()`
        # By line: uses of `getattr` less calls of it with a known name, or with `self`.
        self._getattr_uses: dict[int, int] = {}
        # By line: uses of `Random` less calls of it with a seed.
        self._random_uses: dict[int, int] = {}
        self._is_type = False  # inside an annotation
        self.modules: set[str] = set()  # known to be modules: bound by `import x.y as z`
        self._folder = file.split("/")[:-1]
        self.top_level = self._imported(self._bindings(tree.body))
        self._scopes = [Scope(False, self.top_level)]
        self.visit(tree)

    def dependencies(self) -> Iterator[tuple[int, str]]:
        """Everything imported, and what `import papaya` makes reachable: `papaya.server`."""
        yield from self.imports
        yield from ((line, name) for line, bound, name in self.uses if bound == "papaya")

    # Scopes

    def _bindings(self, nodes: Iterable[ast.AST]) -> dict[str, tuple[str, ...]]:
        """The names that these statements bind in their own scope."""
        bound: dict[str, tuple[str, ...]] = {}
        elsewhere: set[str] = set()
        todo = deque(nodes)
        while todo:
            node = todo.popleft()
            if isinstance(node, ast.Global | ast.Nonlocal):
                elsewhere.update(node.names)
            for name, target in self._binds(node):
                bound[name] = (*bound.get(name, ()), *([target] if target else []))
            if not isinstance(node, (*FUNCTIONS, *COMPREHENSIONS, ast.ClassDef)):
                todo.extend(ast.iter_child_nodes(node))
        return {name: targets for name, targets in bound.items() if name not in elsewhere}

    def _binds(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        """The names that this node binds, each with the dotted name that it imports, if any."""
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    top = alias.name.partition(".")[0]
                    yield alias.asname or top, alias.name if alias.asname else top
            case ast.ImportFrom(names=aliases):
                base = self._imported_from(node)
                yield from (
                    (alias.asname or alias.name, f"{base}.{alias.name}") for alias in aliases
                )
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                yield name, ""
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, ""
            case ast.ClassDef(name=name) | ast.ExceptHandler(name=str(name)):
                yield name, ""
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, ""
            case ast.MatchMapping(rest=str(name)):
                yield name, ""
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                walrus = (n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr))
                yield from ((name, "") for name in walrus)

    def _imported_from(self, node: ast.ImportFrom) -> str:
        base = self._folder[: len(self._folder) + 1 - node.level] if node.level else []
        return ".".join([*base, *([node.module] if node.module else [])])

    @staticmethod
    def _imported(names: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        return {name: targets for name, targets in names.items() if targets}

    def _visit_in(self, scope: Scope, nodes: Iterable[ast.AST]) -> None:
        self._scopes.append(scope)
        for node in nodes:
            self.visit(node)
        self._scopes.pop()

    def _targets(self, name: str) -> tuple[str, ...] | None:
        """The dotted names that `name` is imported as; None if no scope binds it."""
        for scope in reversed(self._scopes):
            if name in scope.names and not (scope.is_class and scope is not self._scopes[-1]):
                return scope.names[name]
        return None

    # Visits

    def visit(self, node: ast.AST) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                self._visit_function(node)
            case ast.ClassDef(body=body):
                outside = (*node.decorator_list, *node.bases, *node.keywords)
                for part in outside:
                    self.visit(part)
                self._visit_in(Scope(True, self._imported(self._bindings(body))), body)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                self._visit_comprehension(node)
            case ast.Import() | ast.ImportFrom():
                self._visit_import(node)
            case ast.Name(id=name, ctx=ast.Load()):
                self._use(node.lineno, name, [])
            case ast.Attribute():
                self._visit_attribute(node)
            case ast.Call():
                self._visit_call(node)
                self.generic_visit(node)
            case ast.arg(annotation=ast.expr() as annotation):
                self._visit_type(annotation)
            case ast.AnnAssign(target=target, annotation=annotation, value=value):
                self._visit_type(annotation)
                for part in (target, *([value] if value else [])):
                    self.visit(part)
            case _:
                self.generic_visit(node)

    @property
    def computed(self) -> list[int]:
        """Lines that may get any attribute by name, or hand `getattr` to others."""
        return [line for line, uses in self._getattr_uses.items() if uses > 0]

    @property
    def unseeded(self) -> list[int]:
        """Lines that create a `Random` without a seed, or hand the class to others."""
        return [line for line, uses in self._random_uses.items() if uses > 0]

    def _visit_function(self, node: Function) -> None:
        """Decorators, defaults and annotations are evaluated outside the function."""
        signature = node.args
        body: Sequence[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else node.body
        if not isinstance(node, ast.Lambda):
            for decorator in node.decorator_list:
                self.visit(decorator)
            if node.returns is not None:
                self._visit_type(node.returns)
        self.visit(signature)
        arguments = [
            argument.arg for argument in ast.walk(signature) if isinstance(argument, ast.arg)
        ]
        bound = {**dict.fromkeys(arguments, ()), **self._bindings(body)}
        self._visit_in(Scope(False, bound), body)

    def _visit_type(self, annotation: ast.expr) -> None:
        """An annotation may name `Random`; other code may only call it, with a seed."""
        self._is_type, before = True, self._is_type
        self.visit(annotation)
        self._is_type = before

    def _visit_comprehension(self, node: Comprehension) -> None:
        """The first iterable is evaluated outside the comprehension."""
        first, *others = node.generators
        self.visit(first.iter)
        bound = self._bindings(generator.target for generator in node.generators)
        results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self._visit_in(Scope(False, bound), [first.target, *first.ifs, *others, *results])

    def _visit_import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            self.modules.update(names)
        else:
            base = self._imported_from(node)
            names = [f"{base}.{alias.name}" for alias in node.names]
        self.imports += [(node.lineno, name) for name in names]

    def _visit_attribute(self, node: ast.Attribute) -> None:
        attributes: list[str] = []
        value: ast.expr = node
        while isinstance(value, ast.Attribute):
            attributes.insert(0, value.attr)
            value = value.value
        self.attributes += [(node.lineno, name) for name in attributes]
        if isinstance(value, ast.Name):
            self._use(node.lineno, value.id, attributes)
        else:
            self.visit(value)

    def _use(self, line: int, name: str, attributes: Sequence[str]) -> None:
        targets = self._targets(name)
        if targets is None:
            self.unbound.append((line, name))
            if name == "getattr":
                self._getattr_uses[line] = self._getattr_uses.get(line, 0) + 1
        for target in targets or ():
            used = ".".join([target, *attributes])
            self.uses.append((line, target, used))
            if used == RANDOM and not self._is_type:
                self._random_uses[line] = self._random_uses.get(line, 0) + 1

    def _visit_call(self, node: ast.Call) -> None:
        called = self._called(node.func)
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                self.attributes.append((node.lineno, name))
                self._getattr_uses[node.lineno] = self._getattr_uses.get(node.lineno, 0) - 1
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="self"), *_]):
                self._getattr_uses[node.lineno] = self._getattr_uses.get(node.lineno, 0) - 1
            case ast.Call(func=ast.Attribute(attr="seed")):
                given = [*node.args, *(keyword.value for keyword in node.keywords)]
                if f"{RANDOM}.seed" in called:  # Random.seed(rng, 7)
                    given = given[1:]
                if not given or _is_none(given[0]) or isinstance(given[0], ast.Starred):
                    self.seeded_by_the_system.append(node.lineno)
        seed = node.args[0] if node.args else ast.Constant(None)
        if RANDOM in called and not isinstance(seed, ast.Starred) and not _is_none(seed):
            line = node.func.lineno
            self._random_uses[line] = self._random_uses.get(line, 0) - 1
        if called & {"importlib.import_module", "importlib.__import__", "__import__"}:
            self.imports += [(node.lineno, name) for name in self._dynamic_imports(node)]

    def _called(self, function: ast.expr) -> set[str]:
        """The dotted names that this expression may stand for."""
        match function:
            case ast.Name(id=name):
                targets = self._targets(name)
                return {name} if targets is None else set(targets)
            case ast.Attribute(value=value, attr=attribute):
                return {f"{name}.{attribute}" for name in self._called(value)}
        return set()

    def _dynamic_imports(self, call: ast.Call) -> Iterator[str]:
        """The module named by import_module("papaya.server"); the start of an f-string counts."""
        for argument in (*call.args[:1], *(k.value for k in call.keywords if k.arg == "name")):
            first = argument.values[0] if isinstance(argument, ast.JoinedStr) else argument
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                name = first.value.lstrip(".")
                level = len(first.value) - len(name)
                base = self._folder[: len(self._folder) + 1 - level] if level else []
                yield ".".join([*base, name.rstrip(".")])


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


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
