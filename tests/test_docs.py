"""The docs say what the code says: generated parts are current, commands parse, YAML and links are real."""

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from dpone_dagster import cli
from dpone_dagster.declarations.loader import load_manifest
from dpone_dagster.declarations.schema import reference
from dpone_dagster.errors import CODES, DponeError
from dpone_dagster.journal.graph import mermaid
from dpone_dagster.planning.dbt_manifest import DponeMeta
from tests import house

ROOT = Path(__file__).parents[1]
DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def between(text: str, name: str) -> str:
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    return text[text.index(begin) + len(begin) : text.index(end)]


def generated() -> dict[tuple[str, str], str]:
    rows = [f"| `{c.code}` | {c.meaning} | {c.next_step} |" for c in sorted(CODES.values(), key=lambda c: c.code)]
    table = "\n".join(["| code | meaning | next step |", "|---|---|---|", *rows])
    return {
        ("manifest.md", "reference"): reference(),
        ("how-it-works.md", "house"): f"```mermaid\n{house.mermaid()}\n```\n",
        ("how-it-works.md", "state graph"): f"```mermaid\n{mermaid()}\n```\n",
        ("when-it-fails.md", "codes"): table + "\n",
    }


@pytest.mark.parametrize(("page", "part"), generated())
def test_generated_parts_are_current(page: str, part: str) -> None:
    assert between((ROOT / "docs" / page).read_text(), part) == generated()[page, part]


def test_no_arrow_of_the_house_runs_back_up() -> None:
    assert house.back_up() == []


@pytest.mark.parametrize("page", DOCS, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), link


def commands() -> list[str]:
    found = []
    for page in DOCS:
        for block in re.findall(r"```\n(.*?)```", page.read_text(), re.S):
            for line in block.splitlines():
                if match := re.match(r"(?:DPONE_FAULT=\S+ )?(?:\.venv/bin/)?dpone (\S.*?)(?:\s+#.*)?$", line):
                    found.append(match[1])
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_documented_commands_exist_with_their_options(command: str) -> None:
    words = command.split()
    group = words[:2] if words[0] in ("baseline", "hooks", "guard") else words[:1]
    shown = CliRunner().invoke(cli.app, [*group, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    for option in (w for w in words if w.startswith("--")):
        assert option in re.sub(r"\x1b\[[0-9;]*m", "", shown.output)


def test_the_documented_declaration_is_accepted() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "declare-a-mart.md").read_text(), re.S)
    (model,) = yaml.safe_load(block)["models"]
    meta = DponeMeta.parse(model["meta"]["dpone"])
    assert [g.id for g in meta.gates] == ["row_count", "min_rows", "typed_hash"]


def test_the_documented_manifest_is_accepted(tmp_path: Path) -> None:
    block = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "manifest.md").read_text(), re.S)[0]
    (tmp_path / "flights_daily.yaml").write_text(block)
    (process,) = load_manifest(tmp_path / "flights_daily.yaml", root=tmp_path).processes
    assert [g.id for g in process.quality.gates] == ["same_rows", "not_empty", "same_values", "key_is_unique"]
    assert [h.execution.orchestrator for h in process.source.options.hooks.pre_hook] == ["separate_task"]
    assert (process.source.read.mode, process.sink.strategy) == ("daily", "replace")
    (tmp_path / "flights_daily.yaml").write_text(block.replace("threshold", "treshold"))
    with pytest.raises(DponeError) as caught:
        load_manifest(tmp_path / "flights_daily.yaml", root=tmp_path)
    assert f"\n{caught.value.sentence}\n" in (ROOT / "docs" / "manifest.md").read_text()


if __name__ == "__main__":  # rewrites the generated parts
    for (page, part), text in generated().items():
        path = ROOT / "docs" / page
        old = path.read_text()
        path.write_text(
            old.replace(between(old, part), text)
            if between(old, part)
            else old.replace(f"<!-- {part}: begin -->\n", f"<!-- {part}: begin -->\n{text}")
        )
