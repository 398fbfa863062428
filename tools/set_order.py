"""Finds where the order of a set becomes visible, for `tools/purity.py`.

What a name is follows from its file alone. A kind is "set", "sets" (a container of sets), "view"
(of a dictionary: ordered by itself, but a set as soon as two are combined) or "" (anything else, or
unknown).
"""

import ast

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
