"""The README says what is so: its file tree, its commands, its quick start."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import fsdp_ipc

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def _block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_tree_names_every_file_once_and_no_other() -> None:
    named: list[str] = []
    folder = ""
    for line in _block("text").splitlines():
        name = line.lstrip("├└─ ").split()[0]
        if line[0] in "├└":
            named.append(folder + name)
        else:
            folder = name
    assert len(set(named)) == len(named)
    there = {
        str(path.relative_to(ROOT)) + ("/" if path.is_dir() else "")
        for folder in ("fsdp_ipc", "recipes")
        for path in (ROOT / folder).iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    } - {"recipes/__init__.py"}
    assert sorted(set(named) - there) == [], "named in the README, but not there"
    assert sorted(there - set(named)) == [], "there, but not named in the README"


def test_every_make_target_that_it_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {
        "demo",
        "test",
        "test-fast",
        "lint",
        "type",
        "check",
        "bench",
        "doctor",
        "clean",
        "help",
    } <= targets
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE)) <= targets


def test_the_quick_start_has_20_lines_and_imports_what_exists() -> None:
    code = _block("python")
    assert len(code.splitlines()) <= 20
    imported = [
        alias.name
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and node.module == "fsdp_ipc"
        for alias in node.names
    ]
    assert imported
    assert set(imported) <= set(fsdp_ipc.__all__)
