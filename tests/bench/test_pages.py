# SPDX-License-Identifier: MIT
"""docs/results/pages.py: pages of result files, and whether those that are there are of them."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs/results/pages.py"
COLUMNS = "policy,budget,slots,bytes,kl,kl_se"
ROWS = [
    "full_cache/half,1.0,896,1000,0.00004,0.00001",
    "full_cache/q8_0,1.0,896,550,0.0002,",
    "fold/q8_0,5%,157,100,0.0038,0.0002",
    "h2o/q8_0,5%,160,100,0.0361,0.0042",
    "fold/q8_0,2.5%,70,50,0.0203,",
    "h2o/q8_0,2.5%,72,50,0.0102,",
    "fold/k6v4,5%,180,100,0.0034,0.0006",
]


def write(folder: Path, name: str, room: int, rows: list[str] = ROWS) -> None:
    facts = [
        "# Some-Model.Q4_1: 6 prompts of 896 tokens",
        "# commit 12345678, 2026-11-29, a processor, 2 cores; ± standard error",
        f"# bash examples/run --model some --text examples/models/held-out.txt --room {room} --budgets '2.5%,5%'",
    ]
    (folder / name).write_text("\n".join([*facts, COLUMNS, *rows]) + "\n")


def run(results: Path, to: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, "--results", results, "--to", to, *more]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    results, to = tmp_path / "results", tmp_path / "pages"
    results.mkdir(), to.mkdir()
    write(results, "examination-some-1.csv", 0)
    write(results, "examination-some-2.csv", 256)
    return results, to


def test_a_page_has_a_section_for_each_run_and_a_row_for_each_policy(folders: tuple[Path, Path]) -> None:
    results, to = folders
    assert run(results, to).returncode == 0
    assert [f.name for f in to.iterdir()] == ["some.md"]
    page = (to / "some.md").read_text()
    assert page.startswith("# Some-Model\n")
    assert page.index("## held-out, 256 slots of slack") < page.index("## held-out, no slack")
    for line in [
        "| KL; slots per head | 5 % | 10 % |",
        "| `fold/q8_0` | 0.020; 70 | 0.0038 ± 0.0002; 157 |",
        "| `h2o/q8_0` | **0.010; 72** | 0.036 ± 0.0042; 160 |",
        "| `fold/k6v4` | refused | **0.0034 ± 0.0006; 180** |",
        "| best `fold` over the best other | 1.99 | 0.09 |",
        "| `full_cache/q8_0` | 55 % | 0.0002 |",
        "*6 prompts of 896 tokens; commit 12345678, 2026-11-29, a processor, 2 cores; ± standard error.*",
    ]:
        assert page.count(line + "\n") == 2, line


def test_pages_that_are_not_of_the_files_are_found(folders: tuple[Path, Path]) -> None:
    results, to = folders
    assert run(results, to, "--check").returncode == 1  # none yet
    assert list(to.iterdir()) == []
    run(results, to)
    assert run(results, to, "--check").returncode == 0
    page = (to / "some.md").read_text()
    (to / "some.md").write_text(page.replace("0.0038", "0.0037"))
    stale = run(results, to, "--check")
    assert stale.returncode == 1 and "some.md" in stale.stderr
    run(results, to)
    (to / "other.md").write_text("of no file\n")
    assert "other.md" in run(results, to, "--check").stderr


def test_a_file_without_its_facts_is_refused(folders: tuple[Path, Path]) -> None:
    results, to = folders
    (results / "examination-some-3.csv").write_text(COLUMNS + "\n" + ROWS[0] + "\n")
    done = run(results, to)
    assert done.returncode == 1 and "expected three lines of facts in examination-some-3.csv, got 0" in done.stderr
    assert list(to.iterdir()) == []
