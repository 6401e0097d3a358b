# SPDX-License-Identifier: MIT
"""docs/results/pages.py: pages of result files, and whether those that are there, and numbers elsewhere, are theirs."""

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
COST = """# A step on a processor: time over attention's
# commit 12345678, 2026-11-28, a processor
# decode_bench
policy,256,step_1024,step_1024_se,step_4096
h2o,1.13,1.05,0.02,1.0
fold,3.13,1.333,,
"""


def write(root: Path, name: str, room: int, rows: list[str] = ROWS) -> None:
    facts = [
        "# Some-Model.Q4_1: 6 prompts of 896 tokens",
        "# commit 12345678, 2026-11-29, a processor, 2 cores; ± standard error",
        f"# bash examples/run --model some --text examples/models/held-out.txt --room {room} --budgets '2.5%,5%'",
    ]
    (root / "bench/results" / name).write_text("\n".join([*facts, COLUMNS, *rows]) + "\n")


def run(root: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, "--root", root, *more], capture_output=True, text=True, check=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "bench/results").mkdir(parents=True), (tmp_path / "docs/results").mkdir(parents=True)
    write(tmp_path, "examination-some-1.csv", 0)
    write(tmp_path, "examination-some-2.csv", 256)
    (tmp_path / "bench/results/cost-step-2026-11-28.csv").write_text(COST)
    return tmp_path


def test_a_page_has_a_section_for_each_run_and_a_row_for_each_policy(root: Path) -> None:
    assert run(root).returncode == 0
    assert sorted(f.name for f in (root / "docs/results").iterdir()) == ["cost.md", "some.md"]
    page = (root / "docs/results/some.md").read_text()
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


def test_any_file_has_a_section(root: Path) -> None:
    run(root)
    page = (root / "docs/results/cost.md").read_text()
    for line in [
        "## A step on a processor",
        "| policy | 256 | step, 1024 / 4096 |",
        "| `h2o` | 1.13 | 1.05 ± 0.02 / 1.0 |",
        "| `fold` | 3.13 | 1.333 / – |",
        "*Time over attention's; commit 12345678, 2026-11-28, a processor.*",
        "    decode_bench",
    ]:
        assert page.count(line + "\n") == 1, line


def test_pages_that_are_not_of_the_files_are_found(root: Path) -> None:
    pages = root / "docs/results"
    assert run(root, "--check").returncode == 1  # none yet
    assert list(pages.iterdir()) == []
    run(root)
    assert run(root, "--check").returncode == 0
    page = (pages / "some.md").read_text()
    (pages / "some.md").write_text(page.replace("0.0038", "0.0037"))
    stale = run(root, "--check")
    assert stale.returncode == 1 and "some.md" in stale.stderr
    run(root)
    (pages / "other.md").write_text("of no file\n")
    assert "other.md" in run(root, "--check").stderr


def test_a_number_without_a_source_is_found(root: Path) -> None:
    link = "([here](docs/results/cost.md#a-step-on-a-processor))"
    table = "| | step |\n|---|---|\n| `fold` | {} |\n\n*{}*\n"
    for page, wrong in [
        (f"`fold` takes 1.33 of attention's time, not 1.3333 {link}.", ["1.3333 in"]),
        (f"`fold` takes 1.34 {link}.", ["1.34 in"]),
        (f"- One takes 1.33 {link}.\n- Another, too: 1.33.", ["1.33 in “- Another"]),
        (table.format("3.1", link), []),
        (table.format("4", link), ["4 in"]),
        (table.format("3", link), ["3 in"]),  # 3.13 is no count of 3
        (table.format("3.1", "no link"), ["3.1 in"]),
        (f"It needs Eigen 3.4, C++20 and `x = 7.5`, of 2026-11-28 {link}.\n\n    at 9.9 %\n", []),
        ("```cpp\nint y;\n\nfloat x = 9.9;\n```\n", []),
        ("It takes 16 % and 3 ms.", ["16 in", "3 in"]),
        ("See [there](docs/results/cost.md#a-step).", ["cost.md#a-step, which is not there"]),
    ]:
        (root / "README.md").write_text(page)
        run(root)
        done = run(root, "--check")
        assert done.returncode == bool(wrong), page
        found = done.stderr.splitlines()[1:]
        assert len(found) == len(wrong), page
        assert all(line.startswith("README.md: ") and w in line for w, line in zip(wrong, found)), done.stderr
    (root / "README.md").unlink()
    (root / "docs/page.md").write_text("Where no result is linked, 4.5 may be a parameter.\n")
    assert run(root, "--check").returncode == 0
    (root / "docs/page.md").write_text("It takes 4.5 ([here](results/cost.md)).\n")
    assert "docs/page.md: 4.5 in" in run(root, "--check").stderr


def test_the_first_table_of_the_readme_is_made(root: Path) -> None:
    (root / "README.md").write_text("before\n<!-- pages.py: KL -->\nold\n<!-- end -->\nafter\n")
    assert run(root).returncode == 0
    assert (root / "README.md").read_text().splitlines() == [
        "before",
        "<!-- pages.py: KL -->",
        "| policy | rows in | % of a 16-bit cache | KL, [Some-Model](docs/results/some.md#held-out-no-slack) |",
        "| --- | --- | --- | --- |",
        "| `fold` | `q8_0` | 5 % | 0.020 |",
        "| `fold` | `k6v4` | 10 % | 0.0034 ± 0.0006 |",
        "| `h2o` | `q8_0` | 10 % | 0.036 ± 0.0042 |",
        "| no eviction | `q8_0` | 55 % | 0.0002 |",
        "<!-- end -->",
        "after",
    ]
    assert run(root, "--check").returncode == 0


def test_a_file_without_its_facts_is_refused(root: Path) -> None:
    (root / "bench/results/examination-some-3.csv").write_text(COLUMNS + "\n" + ROWS[0] + "\n")
    done = run(root)
    assert done.returncode == 1 and "expected three lines of facts in examination-some-3.csv, got 0" in done.stderr
    assert list((root / "docs/results").iterdir()) == []
    (root / "bench/results/examination-some-3.csv").unlink()
    (root / "bench/results/speed-1.csv").write_text(COST)
    assert "expected a file named after one of smollm2" in run(root).stderr
