"""What models read names no folder of this host unless a caller asks for it."""

from __future__ import annotations

import ast
from pathlib import Path


def test_locations_are_logical_by_default(repo: Path) -> None:
    """Every parameter and field called `locations` that has a default has `logical`, wherever it stands."""
    defaults: dict[str, str] = {}
    for path in sorted((repo / "kdskills").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            pairs: list[tuple[str, ast.expr | None]] = []
            if isinstance(node, ast.arguments):
                last = [*node.posonlyargs, *node.args][-len(node.defaults) :] if node.defaults else []
                pairs = [(arg.arg, default) for arg, default in zip(last, node.defaults, strict=True)]
                pairs += [(arg.arg, default) for arg, default in zip(node.kwonlyargs, node.kw_defaults, strict=True)]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                pairs = [(node.target.id, node.value)]
            for name, default in pairs:
                if name == "locations" and default is not None:
                    defaults[f"{path.relative_to(repo)}:{default.lineno}"] = ast.unparse(default)
    assert len(defaults) >= 3
    assert {where: default for where, default in defaults.items() if default != "'logical'"} == {}
