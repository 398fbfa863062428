"""The rule that the machines are pure: what they and all that they import may use.

The tables below are the rule; the code under them only reads them. Names are followed through files
that import them from elsewhere.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from tools.set_order import SetOrder
from tools.sources import Names, Source, Violation

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
    *("contextlib.contextmanager", "contextlib.nullcontext", "contextlib.suppress"),
    # On strings. load and dump work on files.
    *("json.dumps", "json.loads"),
    # Parses addresses; opens no socket.
    "ipaddress.ip_address",
    "ipaddress.ip_network",
    # A generator with its own seed. The functions of `random` share one seeded by the system.
    "random.Random",
    # Structs, and a parser of bytes.
    *("msgspec.Struct", "msgspec.Meta", "msgspec.field", "msgspec.convert", "msgspec.to_builtins"),
    *("msgspec.StructMeta", "msgspec.UNSET", "msgspec.UnsetType"),
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
    """The pure packages with everything of papaya that they import, and what is impure in them.

    `is_followed`: whether an import of a file is its own, and not reported by another rule.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        packages: Sequence[str],
        is_followed: Callable[[Source, str], bool],
    ) -> None:
        self._is_followed = is_followed
        self._sources = {source.module: source for source in sources}
        plain = (source.names.modules for source in sources)
        self._modules = {*self._sources, *(name for names in plain for name in names)}
        # pure module -> the module that imports it, or "" if its package is pure
        self._importers = self._closure(packages)

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

    def _closure(self, packages: Sequence[str]) -> dict[str, str]:
        importers = {m: "" for m, source in self._sources.items() if source.package in packages}
        todo = deque(importers)
        while todo:
            module = todo.popleft()
            for target in self._imported_by(module):
                if target not in importers:
                    importers[target] = module
                    todo.append(target)
        return importers

    def _imported_by(self, module: str) -> Iterator[str]:
        """Modules that Python runs when it imports this one, except refused ones.

        Refused imports are reported by another rule; following them would only repeat it.
        """
        source = self._sources[module]
        names = [name for _, name in source.names.dependencies()]
        for name in (module, *(name for name in names if self._is_followed(source, name))):
            parts = name.split(".")
            prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
            yield from (prefix for prefix in prefixes if prefix in self._sources)

    def _impurities(self, names: Names) -> Iterator[tuple[int, str, str]]:
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

    def _impure_imports(self, names: Names) -> Iterator[tuple[int, str, str]]:
        for line, name in names.imports:
            if name.endswith(".*"):
                yield line, f"imports `{name}`", HIDDEN
                continue
            for full in self._full_names(name):
                if not self._is_ours(full) and not is_importable(full):
                    yield line, f"imports `{full}`", _remedy(full)

    def _impure_uses(self, names: Names) -> Iterator[tuple[int, str, str]]:
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
