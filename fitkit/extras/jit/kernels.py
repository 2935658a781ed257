"""One C++ file for all kernels of a graph.

Torch's compiler calls g++ once a kernel, and nearly all of each call is the header, the binding to
Python and the link. The 16 kernels of a CNN's step take 2.6 CPU seconds in one file, 14.5 in 16
files. The code and the flags are the same, and so are the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

FILE_OF = 12
"""From twice as many kernels on, there are several files, which workers compile side by side."""

FUNCTION = re.compile(r'extern "C"\s+void\s+kernel\(')
"""How torch begins a kernel's function. Only a text that has it once is joined to others."""


class Kernel(NamedTuple):
    """A kernel that waits for the others of its graph.

    Attributes:
        types: the C++ types of its arguments.
        text: its C++.
    """

    types: Sequence[str]
    text: str


class UnknownFormError(Exception):
    """Says that torch writes its files in another way than is known here."""


@contextmanager
def joined() -> Iterator[None]:
    """Join the kernels of each graph that torch compiles or loads in a block.

    Where that can't be, torch compiles each as ever: names and forms of its texts are private.
    """
    try:
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        alone, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait
        assert CppPythonBindingsCodeCache.suffix_template
    except (ImportError, AttributeError, AssertionError):
        yield
        return

    def collect(self: Any, argtypes: list[str], source_code: str) -> Any:
        if not _fits(source_code):
            return alone(self, argtypes, source_code)
        return Kernel(argtypes, source_code)

    def wait_for_all(self: Any, scope: dict[str, Any]) -> None:
        kernels = {name: one for name, one in scope.items() if isinstance(one, Kernel)}
        scope.update(_compiled(self, kernels, alone))
        wait(self, scope)

    with ExitStack() as stack:
        stack.enter_context(patch.object(AsyncCompile, "cpp_pybinding", collect))
        stack.enter_context(patch.object(AsyncCompile, "wait", wait_for_all))
        yield


def _fits(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.startswith("#")]
    known = all(line.startswith(("#include", "#pragma")) for line in lines)
    return known and len(FUNCTION.findall(text)) == 1


def _is_include(line: str) -> bool:
    return line.startswith("#include")


def _compiled(
    compiler: Any, kernels: dict[str, Kernel], alone: Callable[..., Any]
) -> dict[str, Any]:
    """Compile kernels; return what torch's own way would put in their places.

    Args:
        compiler: torch's object that compiles a graph's kernels.
        kernels: by their names.
        alone: compiles one in a file of its own.
    """
    from torch._inductor.async_compile import get_compile_threads
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    if len(kernels) > 1:
        names = list(kernels)
        found: dict[str, Any] = {}
        files = max(1, min(get_compile_threads(), len(names) // FILE_OF))
        submit = {"submit_fn": compiler.submit} if files > 1 else {}
        try:
            loads = []
            for first in range(files):
                own = names[first::files]
                text = one_file([kernels[name] for name in own])
                loads.append((own, CppPythonBindingsCodeCache.load_async(text, **submit)))
            for own, load in loads:
                module = load()
                found |= {name: getattr(module, _name(number)) for number, name in enumerate(own)}
            return found
        except Exception:  # torch's own way is right, or raises what a user of torch knows
            pass
    return {name: alone(compiler, *kernel) for name, kernel in kernels.items()}


def _name(number: int) -> str:
    return f"kernel_{number}"


def one_file(kernels: Sequence[Kernel]) -> str:
    """Return the C++ of a Python module whose functions `kernel_0`, `kernel_1`, ... are kernels.

    Raises:
        UnknownFormError: torch's text around a kernel isn't what is known here.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache

    includes: dict[str, None] = {}
    parts, methods = [], []
    before = after = ""
    for number, kernel in enumerate(kernels):
        taken = ", ".join(
            f"parse_arg<{one.replace('const ', '')}>(args, {n})"
            for n, one in enumerate(kernel.types)
        )
        around = Cache.suffix_template.format(
            arg_len=len(kernel.types),
            call_entry_func=Cache.call_entry_function.format(taken),
            entry_func=Cache.entry_function,
            extra_parse_arg=Cache.extra_parse_arg.format(array_len=-1),
        )
        before, found, rest = around.partition(WRAPPER)
        body, ends, after = rest.partition(METHODS)
        if not found or not ends or METHOD not in after:
            raise UnknownFormError
        lines = kernel.text.splitlines()
        includes |= dict.fromkeys(filter(_is_include, lines))
        own = "\n".join(line for line in lines if not _is_include(line))
        name = _name(number)
        wrapper = WRAPPER.replace("kernel", name) + body
        parts.append((name, own, wrapper))
        methods.append(METHOD.replace('"kernel"', f'"{name}"').replace("kernel_py", f"{name}_py"))
    text = "\n".join(includes)
    for name, own, _ in parts:  # a name of one kernel's helpers means nothing to the next
        text += f"\n#define kernel {name}\nnamespace of_{name} {{\n{own}\n}}\n#undef kernel\n"
    text += before
    for name, _, wrapper in parts:
        text += f"#define kernel of_{name}::{name}\n{wrapper}\n#undef kernel\n"
    return text + METHODS + after.replace(METHOD, "\n".join(methods))


WRAPPER, METHODS = "static PyObject* kernel_py(", "static PyMethodDef py_methods[]"
METHOD = '{"kernel", kernel_py, METH_VARARGS, ""},'
"""Where torch's text around a kernel has its function for Python, and the list of all of them."""
