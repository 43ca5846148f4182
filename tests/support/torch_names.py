"""The names of torch that modules use, and whether an installed torch has them.

    python tests/support/torch_names.py           the names that this torch lacks
    python tests/support/torch_names.py --write   adds those it has to torch_2_11_names.txt

With the Python of an environment that holds torch 2.11, this says what `asyncrl gpu-check` could
not use there. It needs nothing but that torch. A name is `torch.zeros`, or `torch.zeros(device=)`
for an argument that a call names. Methods of tensors are not looked at, nor are arguments of
functions that are not written in Python.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KNOWN = Path(__file__).with_name("torch_2_11_names.txt")
"""Names that torch 2.11.0 has."""
FOLDERS = ("rollout", "wire", "cache", "engine", "trainer", "asyncrl/gpu_check", "asyncrl/tasks")
OTHERS = ("engine/vllm", "engine/sglang", "engine/remote")
"""Parts of these folders that run with the torch of vLLM or SGLang."""


def names_used() -> dict[str, str]:
    """Each name of torch, and a file that uses it."""
    found: dict[str, str] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            where = path.relative_to(ROOT).as_posix()
            if not where.startswith(OTHERS):
                for name in _names_in(ast.parse(path.read_text(encoding="utf-8"))):
                    found.setdefault(name, where)
    return dict(sorted(found.items()))


def _names_in(tree: ast.Module) -> Iterator[str]:
    """Full names: of imports, of attributes of what was imported, and of arguments of calls."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        for name, alias, held in _imported(node):
            yield name
            aliases[alias] = held
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else node
        head, *rest = _chain(called) or [""]
        if head in aliases:
            name = ".".join([aliases[head], *rest])
            yield name
            if isinstance(node, ast.Call):
                yield from (f"{name}({one.arg}=)" for one in node.keywords if one.arg)


def _imported(node: ast.AST) -> Iterator[tuple[str, str, str]]:
    """What is imported of torch: its name, what it is called here, and what that stands for."""
    if isinstance(node, ast.Import):
        for one in node.names:
            if one.name.split(".")[0] == "torch":
                yield one.name, one.asname or "torch", one.name if one.asname else "torch"
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
        for one in node.names:
            name = f"{node.module}.{one.name}"
            yield name, one.asname or one.name, name


def _chain(node: ast.AST) -> list[str] | None:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := _chain(node.value)) is not None:
        return [*before, node.attr]
    return None


def exists(name: str) -> bool:
    """Whether the installed torch has it, as a module, an attribute or an argument."""
    name, _, argument = name.partition("(")
    found = _find(name)
    return found is not None and (not argument or _takes(found, argument.removesuffix("=)")))


def _takes(function: Any, argument: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # not written in Python
        return True
    kinds = {one.kind for one in parameters.values()}
    return argument in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _find(name: str) -> Any:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            found = getattr(found, part, None)
        return found
    return None


if __name__ == "__main__":
    used = names_used()
    lacking = [name for name in used if not exists(name)]
    if sys.argv[1:] == ["--write"]:
        known = {*KNOWN.read_text().split(), *used} - set(lacking)
        KNOWN.write_text("".join(f"{name}\n" for name in sorted(known)))
    print("".join(f"{name}  {used[name]}\n" for name in lacking) or "all are there")
