#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The pages of this folder, one for each model that `bash bench/tables examination-MODEL` examined.

    python3 docs/results/pages.py            writes them, from bench/results
    python3 docs/results/pages.py --check    exits with 1 if that would change one
"""

import argparse
import csv
import re
import shlex
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAD = """# {model}

What compression costs this model: `bash bench/tables --results bench/results examination-{name}`
measures it into [bench/results](../../bench/results), and `python3 docs/results/pages.py` writes this
page from there. KL is the mean divergence from the full float32 cache's next-token distribution,
nats per token, over 256 tokens; ± the standard error over prompts. Shares are of a 16-bit cache's
bytes, positions and log-mass counted; what is held after the prompt counts, the policy's state too.
Slack: slots per head for the tokens after the prompt, which are not counted. **Bold**: the least of
a column.
"""


@dataclass
class Run:
    """One file: what it is of, who measured it, how, and its rows."""

    model: str
    prompts: str
    measured: str
    command: str
    rows: list[dict[str, str]]

    @property
    def options(self) -> dict[str, str]:
        words = shlex.split(self.command)
        return {a: b for a, b in zip(words, words[1:]) if a.startswith("--")}

    @property
    def name(self) -> str:
        return Path(self.options["--model"]).name


def read(file: Path) -> Run:
    lines = file.read_text().splitlines()
    facts = [line[2:] for line in lines if line.startswith("# ")]
    if len(facts) != 3:
        sys.exit(f"pages.py: expected three lines of facts in {file.name}, got {len(facts)}")
    model, prompts = facts[0].split(": ", 1)
    return Run(model, prompts, facts[1], facts[2], list(csv.DictReader(x for x in lines if not x.startswith("#"))))


def number(x: float) -> str:
    """Two digits, or four behind the point."""
    return f"{x:.4f}" if x < 0.01 else f"{x:.3f}" if x < 0.1 else f"{x:.2f}"


def kl_of(row: dict[str, str]) -> str:
    error = float(row["kl_se"] or 0)
    return number(float(row["kl"])) + (f" ± {number(error)}" if error >= 0.00005 else "")


def share(run: Run, budget: str) -> str:
    """Of a 16-bit cache's bytes; evaluate's shares were of the float32 cache's until 2026-11-29."""
    half = 2 if re.search(r"\d{4}-\d\d-\d\d", run.measured)[0] < "2026-11-30" else 1
    return f"{half * float(budget.removesuffix('%')):g} %"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def evicting(run: Run) -> str:
    cells: dict[str, dict[str, dict[str, str]]] = defaultdict(dict)
    for row in run.rows:
        if row["budget"].endswith("%"):
            cells[row["policy"]][row["budget"]] = row
    budgets = sorted({b for of in cells.values() for b in of}, key=lambda b: float(b.removesuffix("%")))
    least = {b: min(float(of[b]["kl"]) for of in cells.values() if b in of) for b in budgets}

    def cell(of: dict[str, dict[str, str]], b: str) -> str:
        if b not in of:
            return "refused"
        shown = f"{kl_of(of[b])}; {of[b]['slots']}"
        return f"**{shown}**" if float(of[b]["kl"]) == least[b] else shown

    rows = [[f"`{policy}`", *(cell(of, b) for b in budgets)] for policy, of in cells.items()]

    def best(b: str, fold: bool) -> float:
        return min((float(of[b]["kl"]) for p, of in cells.items() if b in of and p.startswith("fold") == fold), default=0)

    ratios = [f"{best(b, True) / best(b, False):.2f}" if best(b, False) > 0 else "" for b in budgets]
    rows.append(["best `fold` over the best other", *ratios])
    return table(["KL; slots per head", *(share(run, b) for b in budgets)], rows)


def whole(run: Run) -> str:
    rows = [row for row in run.rows if not row["budget"].endswith("%")]
    half = next((float(row["bytes"]) for row in rows if row["policy"] == "full_cache/half"), None)
    if half is None:
        return ""
    lines = [[f"`{row['policy']}`", f"{100 * float(row['bytes']) / half:.0f} %", kl_of(row)] for row in rows]
    return table(["without eviction", "bytes", "KL"], lines)


def section(run: Run) -> str:
    text, room = run.options["--text"], run.options["--room"]
    slack = "no slack" if room == "0" else f"{room} slots of slack"
    parts = [f"## {Path(text).stem}, {slack}\n", evicting(run), whole(run)]
    parts.append(f"*{run.prompts[0].upper() + run.prompts[1:]}; {run.measured}.*\n\n    {run.command}\n")
    return "\n".join(part for part in parts if part)


def pages(results: Path) -> dict[str, str]:
    runs: dict[str, list[Run]] = defaultdict(list)
    for file in sorted(results.glob("examination-*.csv")):
        run = read(file)
        runs[run.name].append(run)
    made = {}
    for name, of_model in sorted(runs.items()):
        of_model.sort(key=lambda r: (r.options["--text"], -int(r.options["--room"])))
        head = HEAD.format(model=re.sub(r"\.Q[0-9].*", "", of_model[0].model), name=name)
        made[f"{name}.md"] = "\n".join([head, *map(section, of_model)])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if a page would change")
    parser.add_argument("--results", type=Path, default=ROOT / "bench/results", help="folder of the CSV files")
    parser.add_argument("--to", type=Path, default=Path(__file__).parent, help="folder of the pages")
    options = parser.parse_args()
    made = pages(options.results)
    stale = [name for name, text in made.items()
             if not (options.to / name).exists() or (options.to / name).read_text() != text]
    stale += [f.name for f in options.to.glob("*.md") if f.name not in made]
    if options.check:
        if stale:
            sys.exit(f"pages.py: expected pages of {options.results.name}, got others: {', '.join(stale)}")
        return
    for name, text in made.items():
        (options.to / name).write_text(text)


if __name__ == "__main__":
    main()
