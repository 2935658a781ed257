"""How much a reader of fitkit/ must know, in figures: `python -m tests.house`.

For the core and for `extras/`: files, and tokens and code lines without blanks, docstrings and
comments. For the whole: branches, the share of `Any` among the parameters in `training/`, the
functions there that run a net's forward, the core's files that know of compiled steps, fitkit's own
frames between `fit` and the net's forward, the files that a second `fit` runs code of, and the
largest ring of imports, with those for annotations alone counted and without. The house is judged
by reading; these show a trend.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "fitkit"
FILES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def code(path: Path) -> tuple[int, int]:
    """The lines that hold code, and its tokens."""
    text = path.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in NO_CODE and token.string and token.start[0] not in docstrings
    ]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(lines), len(tokens)


def names_in(path: Path, word: str) -> bool:
    """Whether a file's code names something, apart from what its texts say."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return any(token.type == tokenize.NAME and word in token.string.lower() for token in tokens)


def nodes(names: Iterable[str]) -> Iterator[ast.AST]:
    """All nodes of some modules' trees."""
    for name in names:
        yield from ast.walk(ast.parse(FILES[name].read_text()))


def share_of_any(names: Iterable[str]) -> float:
    """The part of the parameters whose annotation is `Any` or has it at its first place."""
    found = [
        ast.unparse(argument.annotation)
        for node in nodes(names)
        if isinstance(node, ast.arguments)
        for argument in (*node.posonlyargs, *node.args, *node.kwonlyargs)
        if argument.annotation is not None
    ]
    return sum(text == "Any" or text.startswith("Any |") for text in found) / len(found)


def forwards(names: Iterable[str]) -> list[str]:
    """The functions that call a net's forward, by whatever name they know it."""
    found = []
    for name in names:
        for node in ast.walk(ast.parse(FILES[name].read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            inner = {
                part
                for child in ast.walk(node)
                if child is not node and isinstance(child, ast.FunctionDef)
                for part in ast.walk(child)
            }
            calls = [c for c in ast.walk(node) if isinstance(c, ast.Call) and c not in inner]
            called = {re.sub(r"^.*[._]", "", ast.unparse(call.func)) for call in calls}
            if called & {"forward", "caller", "wrapped"}:
                found.append(f"{name}.{node.name}")
    return found


def imports(path: Path, *, annotations: bool) -> set[str]:
    """The modules of fitkit that a file imports at its top level."""
    tree = ast.parse(path.read_text())

    def is_left_out(node: ast.AST) -> bool:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return not annotations
        return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))

    left_out = filter(is_left_out, ast.walk(tree))
    inside = {child for node in left_out for child in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node not in inside:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (whole & FILES.keys()) or ({node.module} & FILES.keys())
    if "extras" not in path.parts:  # The core has extras by name: tests/test_layers.py.
        found = {name for name in found if not name.startswith("fitkit.extras")}
    return found


def largest_ring(*, annotations: bool) -> list[str]:
    """The most modules of which each one imports, by some way, all others."""
    reached = {name: imports(path, annotations=annotations) for name, path in FILES.items()}
    changed = True
    while changed:
        changed = False
        for name, others in reached.items():
            more = others.union(*(reached[other] for other in others))
            changed = changed or len(more) > len(others)
            reached[name] = more
    rings = [
        [other for other in others if name in reached[other]]
        for name, others in reached.items()
        if name in others
    ]
    return max(rings, key=len, default=[])


def way_of_fit(*, own_step: bool = False) -> tuple[int, int]:
    """fitkit's frames above the net's forward, and the files that a second `fit` runs code of.

    Args:
        own_step: whether the model has a `training_step` of its own, which calls itself.
    """
    import torch

    import fitkit

    frames: list[int] = []

    class Net(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            frame, count = sys._getframe(), 0
            while frame is not None:
                count += str(PACKAGE) in frame.f_code.co_filename
                frame = frame.f_back  # type: ignore[assignment]
            frames.append(count)
            return super().forward(x)

    class Own(fitkit.Model):
        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    model = (Own if own_step else fitkit.Model)(Net(4, 3))
    model.compile("adam", "cross_entropy", metrics=["accuracy"], accelerator="cpu")
    x, y = torch.randn(64, 4), torch.randint(3, (64,))
    model.fit(x, y, batch_size=16, verbose=0)
    touched: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: touched.update([frame.f_code.co_filename]))
    try:
        model.fit(x, y, batch_size=16, verbose=0)
    finally:
        sys.setprofile(None)
    return frames[-1], sum(str(PACKAGE) in name for name in touched)


def main() -> None:
    """Print the figures."""
    sizes = {name: code(path) for name, path in FILES.items()}
    extras = [name for name in sizes if name.startswith("fitkit.extras")]
    core = [name for name in sizes if name not in extras]
    training = [name for name in core if name.startswith("fitkit.training")]
    for title, names in (("core", core), ("extras", extras)):
        lines, tokens = (sum(sizes[name][part] for name in names) for part in (0, 1))
        print(f"{title + ': files, code lines, tokens':<38} {len(names)}, {lines:,}, {tokens:,}")
    found = Counter(type(node).__name__ for node in nodes(FILES))
    median = sorted(lines for lines, _ in sizes.values())[len(sizes) // 2]
    texts = {name: FILES[name].read_text().lower() for name in core}
    mention = [name for name, text in texts.items() if "jit" in text]
    coded = [name for name in mention if names_in(FILES[name], "jit")]
    jit_lines = sum("jit" in line for text in texts.values() for line in text.splitlines())
    frames, touched = way_of_fit()
    print(f"median of a file                       {median}")
    print(f"ifs, raises                            {found['If']:,}, {found['Raise']:,}")
    print(f"Any among parameters in training/      {share_of_any(training):.1%}")
    print(f"functions that run a forward           {len(forwards(training))}")
    print(f"core files that mention jit, lines     {len(mention)}, {jit_lines}")
    print(f"those whose code has it in a name      {len(coded)}")
    print(f"own frames, fit to the net             {frames}")
    print(f"the same, with a training_step         {way_of_fit(own_step=True)[0]}")
    print(f"files that a second fit touches        {touched}")
    print(f"largest ring of imports                {len(largest_ring(annotations=False))}")
    print(f"the same, with those for annotations   {len(largest_ring(annotations=True))}")


if __name__ == "__main__":
    main()
