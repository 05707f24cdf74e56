"""The layers: gateway -> actors -> inference; all may import gateway.protocol, which is pure."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("gateway", "actors", "inference")
ALLOWED = {
    "gateway.protocol": {"gateway.protocol"},
    "gateway": {"gateway", "gateway.protocol", "actors", "inference"},
    "actors": {"actors", "inference", "gateway.protocol"},
    "inference": {"inference", "gateway.protocol"},
}
PURE_MAY_USE = {"annotated_types", "orjson", "pydantic", "pydantic_core", "typing_extensions"}
IMPURE = {"asyncio", "socket", "time", "threading", "subprocess", "os", "pathlib", "random", "secrets", "logging"}
PURE_ACTORS = ("actors/conversation.py", "actors/tokencache.py", "actors/adoption.py")

FILES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "gateway.protocol" if parts[:2] == ("gateway", "protocol") else parts[0]


def imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(node.module or "")
    return found


def layer_of(module: str) -> str | None:
    if module == "gateway.protocol" or module.startswith("gateway.protocol."):
        return "gateway.protocol"
    top = module.split(".", maxsplit=1)[0]
    return top if top in LAYERS else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_its_own_layer_and_those_below(path: Path) -> None:
    layers = {layer for module in imported(path) if (layer := layer_of(module)) is not None}

    assert layers <= ALLOWED[package_of(path)]


@pytest.mark.parametrize(
    "path", [path for path in FILES if package_of(path) == "gateway.protocol"], ids=lambda path: path.stem
)
def test_the_protocol_is_pure(path: Path) -> None:
    tops = {module.split(".")[0] for module in imported(path)}

    assert not tops & IMPURE
    assert tops <= set(sys.stdlib_module_names) | PURE_MAY_USE | {"gateway"}
    assert not any(isinstance(node, ast.AsyncFunctionDef) for node in ast.walk(ast.parse(path.read_text())))


@pytest.mark.parametrize("name", PURE_ACTORS)
def test_the_state_of_conversations_is_pure(name: str) -> None:
    assert not {module.split(".")[0] for module in imported(ROOT / name)} & IMPURE


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 600


def test_session_actors_never_import_vllm() -> None:
    """Importing any vllm module costs 7 to 13 CPU seconds and 340 MB (spec/vllm.md section 5)."""
    for path in FILES:
        top_level = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in top_level:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not any(name.split(".")[0] in ("vllm", "torch", "transformers") for name in names), path
