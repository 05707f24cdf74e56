"""Each scenario file, on each of its transports. The bugs are those of public trackers (spec/bugs.md)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scenarios.interpreter import FOLDER, load, play, scenarios


@pytest.mark.parametrize(
    ("path", "transport"), [pytest.param(path, name, id=f"{path.stem}-{name}") for path, name in scenarios()]
)
async def test_scenario(path: Path, transport: str) -> None:
    await play(path, transport)


def test_every_bug_has_a_file_or_a_row_in_the_readme() -> None:
    """Numbers 1 to 93 of spec/bugs.md, and the tests that the rows name are there."""
    wanted = set(range(1, 94))
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    files = {int(path.stem.split("-")[1].rstrip("abc")) for path in FOLDER.glob("*.yaml")}
    rows = {int(line.split("|")[1].strip().split("-")[1]) for line in readme.splitlines() if line.startswith("| O-")}
    assert wanted <= files | rows
    named = re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)`", readme)
    assert [name for name in named if not (FOLDER.parent.parent / name).is_file()] == []
    assert all(scenario["title"] and scenario["source"] for scenario in map(load, FOLDER.glob("*.yaml")))
