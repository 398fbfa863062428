"""The sources that the architecture is checked on, with what each name in them stands for.

Names are resolved to full dotted names (`np.random` is `numpy.random`). Types are not followed:
what a method of an argument does is unknown. Files are parsed and never imported.
"""

import ast
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

RANDOM = "random.Random"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


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


def parsed(file: str, text: str) -> Source:
    """The module of this file; raises SyntaxError."""
    tree = ast.parse(text)
    path = file.removesuffix(".py").split("/")
    module = ".".join(path[:-1] if path[-1] == "__init__" else path)
    return Source(file, module, path[1], tree, Names(file, tree))


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
