"""How the reference shows types, and links names to the pages of Python, torch and others."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst.roles import code_role
from sphinx.domains.python import PyXRefRole
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxRole

import fitkit.strategies
import fitkit.typing
from fitkit.compilation import CompileArguments

INVENTORIES = Path(__file__).parent / "inventories"
SITES = {
    "python": "https://docs.python.org/3/",
    "numpy": "https://numpy.org/doc/stable/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "torchmetrics": "https://lightning.ai/docs/torchmetrics/stable/",
}
"""Each with a file in docs/inventories, so that no build needs the network. A line there is a name
that fitkit's docstrings or signatures use, its role, and its place on the site."""

CALLABLE = "~collections.abc.Callable"
ITERABLE = "~collections.abc.Iterable"
READABLE = {
    "AcceleratorName": "str",
    "AnyCallable": CALLABLE,
    "Arrays": "array | tuple | list | dict",
    "BatchData": "object",
    "BatchTransformsArgument": f"list[{CALLABLE}] | None",
    "Callbacks": "Callback | str | list[Callback | str] | None",
    "CompilerOptions": "dict",
    "Data": f"~torch.utils.data.DataLoader | ~torch.utils.data.Dataset | array | {ITERABLE}",
    "DevicesArgument": "int | str | list[int]",
    "FilePath": "str | ~os.PathLike",
    "LossArgument": f"str | {CALLABLE} | list | dict | None",
    "LossName": "str",
    "LossWeights": "float | list | dict | None",
    "MemoryFormat": "'channels_last' | ~torch.memory_format",
    "MetricName": "str",
    "Metrics": f"str | {CALLABLE} | list | dict",
    "MetricsArgument": f"str | {CALLABLE} | list | dict | None",
    "Name": "str",
    "NamedPrecision": "str | int",
    "Mode": "Literal['auto', 'min', 'max']",
    "Nested": "list | tuple | dict",
    "OneLoss": f"str | {CALLABLE}",
    "OneMetric": f"str | {CALLABLE}",
    "OneScheduler": f"str | ~torch.optim.lr_scheduler.LRScheduler | {CALLABLE}",
    "OptimizerArgument": (
        f"str | dict | ~torch.optim.Optimizer | list[~torch.optim.Optimizer] | {CALLABLE}"
    ),
    "OptimizerName": "str",
    "Outputs": "object",
    "PlainData": "dict",
    "PrecisionName": "str",
    "SchedulerArgument": (
        f"str | dict | ~torch.optim.lr_scheduler.LRScheduler | {CALLABLE} | None"
    ),
    "SchedulerName": "str",
    "StrategyName": "str",
    "Tree": "object",
    "Values": "dict",
    "Verbose": "int | Literal['auto']",
}
"""What signatures show for the types that have names: what you may write, in one line each."""

ALIASES = {
    name: f"fitkit.typing.{name}"
    for name in vars(fitkit.typing)
    if name[0].isupper() and f"\n{name}: TypeAlias = " in inspect.getsource(fitkit.typing)
} | {"Callbacks": "fitkit.callbacks.callback_list.Callbacks"}
"""For `autodoc_type_aliases`, which keeps the names, so that `READABLE` can replace them."""
assert ALIASES.keys() <= READABLE.keys(), ALIASES.keys() - READABLE.keys()


# ---------------------------------------------------------------------- links to other sites


def lines(site: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name, role and place of each of a site's entries."""
    for line in (INVENTORIES / f"{site}.txt").read_text().splitlines():
        name, role, place = line.split()
        yield name, role, place


def inventories(folder: Path) -> dict[str, tuple[str, str]]:
    """For `intersphinx_mapping`: docs/inventories in Sphinx's own format, written to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for site in SITES:
        head = f"# Sphinx inventory version 2\n# Project: {site}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        body = "".join(f"{name} {role} 1 {place} -\n" for name, role, place in lines(site))
        (folder / f"{site}.inv").write_bytes(head.encode() + zlib.compress(body.encode()))
    return {site: (address, str(folder / f"{site}.inv")) for site, address in SITES.items()}


FULL_NAMES = {
    name.rpartition(".")[2]: name
    for site in SITES
    for name, _, _ in lines(site)
    if "." in name and name.rpartition(".")[2][0].isupper() and not name.endswith(".Module")
}
"""Classes of other packages that docstrings name without their module; `Module` is fitkit's."""

SHORT = {"nn": "torch.nn", "Tensor": "torch.Tensor", "(self\\.)?model|Model": "fitkit.Model"}
"""What docstrings call modules and classes, and their names."""


class Code(SphinxRole):
    """`code` in a docstring: a link where it is a name with a module, or a known class."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return what docutils puts at its place."""
        full = FULL_NAMES.get(self.text, self.text)
        for short, place in SHORT.items():
            full = re.sub(rf"^({short})\.", f"{place}.", full)
        if re.fullmatch(r"(\w+\.)+\w+", full):
            text = self.text if full == self.text else f"{self.text} <{full}>"
            return PyXRefRole()("py:obj", self.rawtext, text, self.lineno, self.inliner)
        return code_role("code", self.rawtext, self.text, self.lineno, self.inliner)


# ---------------------------------------------------------------------- signatures


class Readable(ast.NodeTransformer):
    """Types by what one writes: `READABLE` instead of names, unions without repetition."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Sphinx's `TypeAliasForwardRef('fitkit.typing.Name')`."""
        if getattr(node.func, "id", "") == "TypeAliasForwardRef":
            return self._named(ast.parse(node.args[0].value, mode="eval").body)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Return a type in a module of its own, where it has one."""
        return self._named(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Return a type with its module."""
        return self._named(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        """`~module.Name`, which Sphinx shows without the module."""
        shown = self._named(node.operand)
        return node if shown is node.operand else shown

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Return a union: what can be left out shows by its default, and None comes last."""
        if not isinstance(node.op, ast.BitOr):
            return node
        members: dict[str, ast.AST] = {}
        for member in (self.visit(node.left), self.visit(node.right)):
            members |= {ast.unparse(part): part for part in union(member)}
        kept = [name for name in members if not re.fullmatch(r"~?[\w.]*\bUnset|None", name)]
        kept += ["None"] * ("None" in members)
        return ast.parse(" | ".join(kept), mode="eval").body

    @staticmethod
    def _named(node: ast.AST) -> ast.AST:
        text = READABLE.get(ast.unparse(node).rpartition(".")[2])
        return node if text is None else ast.parse(text, mode="eval").body


def union(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the members of a union."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from union(node.left)
        yield from union(node.right)
    else:
        yield node


DEFAULTS: dict[str, dict[str, Any]] = {
    "fitkit.Model.compile": {
        **{field.name: field.default for field in dataclasses.fields(CompileArguments)},
        "optimizer": "adam",
        "num_nodes": 1,
        "gpus": None,
    }
}
"""What `UNSET` means: the values that a first call takes. Three of them say so elsewhere."""


def readable(
    signature: str, returns: str | None, unset: dict[str, Any] | None = None
) -> tuple[str, str | None]:
    """Return a signature as text, with types that read and the defaults that `UNSET` stands for.

    Example:
        >>> readable("(x: fitkit.typing.FilePath | Unset = UNSET)", "None", {"x": "a.h5"})
        ("(x: str | ~os.PathLike='a.h5')", 'None')
    """
    try:
        arguments = ast.parse(f"def f{signature}: pass").body[0].args
        result = returns and ast.parse(returns, mode="eval").body
    except SyntaxError:  # a default that has no spelling, such as an object
        return signature, returns
    change = Readable()
    everyone = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    for argument in (*everyone, arguments.vararg, arguments.kwarg):
        if argument is not None and argument.annotation is not None:
            argument.annotation = change.visit(argument.annotation)
    pairs = [*zip(arguments.args[::-1], arguments.defaults[::-1], strict=False)]
    for argument, default in [
        *pairs,
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]:
        if isinstance(default, ast.Name) and default.id == "UNSET":
            default.id = repr((unset or {})[argument.arg])
    return f"({ast.unparse(arguments)})", result and ast.unparse(change.visit(result))


def shorten(app: Any, what: str, name: str, thing: Any, options: Any, *signature: str) -> Any:
    """Return the event `autodoc-process-signature`."""
    return None if signature[0] is None else readable(*signature, DEFAULTS.get(name))


def one_signature(analyze: Any) -> Any:
    """`ModuleAnalyzer.analyze` without overloads: they are for type checkers, readers need one."""

    def analyzed(self: Any) -> None:
        analyze(self)
        self.overloads = {}

    return analyzed


# ---------------------------------------------------------------------- strategies

PUBLIC = {getattr(fitkit.strategies, name).__name__: name for name in fitkit.strategies.__all__}
"""The names of strategies in their files, and those that users write: `DDP`, `DDPStrategy`."""


def name_strategies() -> None:
    """Let the reference show `DDPStrategy`, and not that it is an alias of `DDP`."""
    for name in PUBLIC.values():
        getattr(fitkit.strategies, name).__name__ = name


def source_of_strategies(app: Any, module: str) -> tuple[str, dict[str, Any]] | None:
    """For viewcode: a module's source, in which strategies have their public names too."""
    if not module.startswith("fitkit.distributed.strategies"):
        return None
    analyzer = ModuleAnalyzer.for_module(module)
    analyzer.find_tags()
    tags = dict(analyzer.tags)
    for name, tag in analyzer.tags.items():
        first, dot, rest = name.partition(".")
        if first in PUBLIC:
            tags[PUBLIC[first] + dot + rest] = tag
    return analyzer.code, tags


# ---------------------------------------------------------------------- seams


def list_names(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """End what a page of `fitkit.seams` says with all its names, for the event
    `autodoc-process-docstring`.
    """
    if what == "module" and name.startswith("fitkit.seams."):
        lines += ["", "Names: " + ", ".join(f"``{one}``" for one in sorted(thing.__all__)) + "."]
