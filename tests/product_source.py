"""The product's source, for tests that read it."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("dpone_dagster", "resources", "io_managers", "checks", "assets")


def is_whole() -> bool:
    """Whether both composition roots exist: before that, not everything listed can be in use."""
    return all((ROOT / "dpone_dagster" / name).exists() for name in ("cli.py", "definitions.py"))


def files(*suffixes: str) -> Iterator[Path]:
    """The product's files with these suffixes."""
    for package in PACKAGES:
        yield from (p for p in sorted((ROOT / package).rglob("*")) if p.suffix in suffixes and p.is_file())


def modules() -> Iterator[tuple[Path, ast.Module]]:
    """The product's Python files, parsed."""
    for path in files(".py"):
        yield path.relative_to(ROOT), ast.parse(path.read_text("utf-8"))
