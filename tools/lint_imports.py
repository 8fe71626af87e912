"""The import law, kept by `make lint`.

A service imports `quartet.shared` and itself; `shared` imports no service; the command line spawns
services and imports none; only the executor imports torch or triton; gateway, scheduler, cli and shared
do without numpy. Imports inside functions and by name (importlib.import_module, __import__) count too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SERVICES = ("gateway", "tokenizer", "scheduler", "executor", "cli")
FORBIDDEN = {
    "executor": set(),
    "tokenizer": {"torch", "triton", "transformers"},
    "gateway": {"torch", "triton", "transformers", "numpy"},
    "scheduler": {"torch", "triton", "transformers", "numpy", "grpc"},
    "cli": {"torch", "triton", "transformers", "numpy"},
    "shared": {"torch", "triton", "transformers", "numpy"},
}


def imported_modules(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything imported; `package` is the file's own package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call):
            function = node.func
            called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if called in ("import_module", "__import__", "run_module"):
                argument = node.args[0] if node.args else None
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value
                else:
                    yield node.lineno, "?"


def problems(source: str, owner: str, package: str) -> list[tuple[int, str]]:
    """What breaks the law in one file. `owner` is "shared" or a service."""
    found = []
    for line, name in imported_modules(ast.parse(source), package):
        if name == "?":
            found.append((line, "imports a module whose name is computed"))
            continue
        parts = name.split(".")
        if parts[0] in FORBIDDEN[owner]:
            found.append((line, f"{owner} must not import {parts[0]}"))
        if parts[0] in ("services", "shared"):
            found.append((line, f"import it as quartet.{parts[0]}"))
        if parts[:2] == ["quartet", "services"]:
            target = parts[2] if len(parts) > 2 else "*"
            if target != owner:
                found.append((line, f"{owner} must not import quartet.services.{target}"))
    return found


def check(root: Path) -> list[str]:
    folders = [("shared", root / "shared"), *((name, root / "services" / name) for name in SERVICES)]
    report = []
    for owner, folder in folders:
        prefix = "quartet" if owner == "shared" else "quartet.services"
        for path in sorted(folder.rglob("*.py")):
            package = ".".join([prefix, owner, *path.parent.relative_to(folder).parts])
            for line, problem in problems(path.read_text(), owner, package):
                report.append(f"{path.relative_to(root)}:{line}: {problem}")
    return report


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    report = check(root)
    for line in report:
        print(line)
    return 1 if report else 0


if __name__ == "__main__":
    sys.exit(main())
