"""The package is read by Python 3.9, also where no such Python is there to read it."""

import ast
import builtins
import pathlib

import pytest

import evenstep

FILES = sorted(pathlib.Path(evenstep.__file__).parent.glob("*.py"))
TYPES = {name for name, value in vars(builtins).items() if isinstance(value, type)} | {"Any", "Tensor", "Path"}


def is_a_type(node: ast.expr) -> bool:
    """By its looks: str, torch.Tensor, None, list[int], Callable[[], int]; not a flag or a set."""
    if isinstance(node, ast.Subscript):
        node = node.value
        return isinstance(node, ast.Name) and (node.id in TYPES or (node.id[0].isupper() and not node.id.isupper()))
    if isinstance(node, ast.Attribute):
        return node.attr in TYPES
    return (isinstance(node, ast.Constant) and node.value is None) or (isinstance(node, ast.Name) and node.id in TYPES)


def unions(text: str) -> list[int]:
    """The lines in which types are joined by | where Python evaluates it: outside of annotations, which no file evaluates."""
    tree = ast.parse(text, feature_version=(3, 9))
    annotations: set[int] = set()
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            annotation = getattr(node, name, None)
            if isinstance(annotation, ast.AST):
                annotations.update(map(id, ast.walk(annotation)))
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and id(node) not in annotations
        if is_a_type(node.left) or is_a_type(node.right)
    ]


def strict_zips(text: str) -> list[int]:
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    zips = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "zip"]
    return [node.lineno for node in zips if any(word.arg == "strict" for word in node.keywords)]


def test_no_file_needs_a_newer_python() -> None:
    assert len(FILES) > 100
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert not unions(text) and not strict_zips(text), path
        assert "from __future__ import annotations" in text or " | None" not in text, path


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("Packs = Callable[[], bytes | str]", [1]),
        ("isinstance(one, int | None)", [1]),
        ("isinstance(one, (int, float)) or cast(list[int] | None, one)", [1]),
        ("def packs(one: bytes | str) -> int | None: ...", []),
        ("flags = FAILED | VOTES; both = dict(a) | {'b': 1} | set()", []),
    ],
)
def test_what_is_newer_is_found(line: str, found: list) -> None:
    assert unions(line) == found


def test_a_strict_zip_is_found() -> None:
    assert strict_zips("zip(a, b)\nzip(a, b, strict=True)") == [2]
