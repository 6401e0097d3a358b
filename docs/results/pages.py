#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Pages of the files in bench/results, and whether README.md and docs say what is in them.

    python3 docs/results/pages.py            writes docs/results/*.md and the tables of README.md
    python3 docs/results/pages.py --check    writes nothing; exits with 1 if that would change one, or if a measured
                                             number of a page has no source

A file is one experiment: what it is of, who measured it and how, in three lines that begin with #; then CSV. The page
that its name begins with has it as a section: a title and conditions come first in its first line. X_se is the
error of X, and columns such as kl_5% and kl_10% are one of the page. Files of `bench/tables examination-MODEL` have
sections of their own form.

A number is measured if it has a point, a unit or %, or stands in a table's cell. Where a paragraph, an item of a list,
or a table with the line below it links to a section here, its measured numbers are in that section, rounded. In the
pages of STRICT each such place has a link.
"""

import argparse
import csv
import re
import shlex
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

PAGES = {
    "smollm2": "SmolLM2-135M-Instruct",
    "gemma3": "Gemma 3 270M",
    "qwen": "Qwen2.5-Coder-0.5B",
    "qwen-1.5b": "Qwen2.5-Coder-1.5B",
    "kvmeld-2m": "kvmeld-2m",
    "cost": "Time and memory",
    "tested": "What ran where",
}
HEAD = """# {title}

Made from [bench/results](../../bench/results) by `python3 docs/results/pages.py`. ±: the standard error.
"""
EXAMINED = """
Sections named by text and slack are of `bash bench/tables --results bench/results examination-{name}`. KL is
the mean divergence from the full float32 cache's next-token distribution, nats per token, over 256
tokens; ± over prompts. Shares are of a 16-bit cache's bytes, positions and log-mass counted; what is
held after the prompt counts, the policy's state too. Slack: slots per head for the tokens after the
prompt, which are not counted. **Bold**: the least of a column.
"""
# The first table of README.md, by policy and share of a 16-bit cache; no share: without eviction.
FIRST = [
    ("fold/q8_0", 5), ("keepkv/q8_0", 5),
    ("fold/k6v4", 10), ("keepkv/q8_0", 10), ("h2o/q8_0", 10),
    ("fold/k6v4", 20), ("keepkv/q8_0", 20), ("h2o/q8_0", 20),
    ("full_cache/k4v4", None), ("full_cache/k8v4", None), ("full_cache/q8_0", None),
]  # fmt: skip
WRITTEN = {"kl": "KL", "mib": "MiB", "kib": "KiB", "mb": "MB", "pin": "PIN"}  # of columns
STRICT = ["README.md", "docs/explanation/benchmarks.md", "docs/explanation/limits.md"]
MARKED = re.compile(r"(<!-- pages.py: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass
class Run:
    """One file: what it is of, who measured it, how, and its rows."""

    file: str
    title: str
    how: str
    measured: str
    command: str
    rows: list[dict[str, str]]
    text: str

    @property
    def options(self) -> dict[str, str]:
        words = shlex.split(self.command)
        return {a: b for a, b in zip(words, words[1:]) if a.startswith("--")}

    @property
    def examination(self) -> bool:
        return self.file.startswith("examination-")

    @property
    def page(self) -> str:
        if self.examination:
            return Path(self.options["--model"]).name
        of = [page for page in PAGES if self.file.startswith(page + "-")]
        if not of:
            sys.exit(f"pages.py: expected a file named after one of {', '.join(PAGES)}, got {self.file}")
        return max(of, key=len)

    @property
    def subject(self) -> str:
        """What its page is of."""
        return PAGES.get(self.page) or re.sub(r"\.Q[0-9].*", "", self.title)

    @property
    def heading(self) -> str:
        if not self.examination:
            return self.title
        room = self.options["--room"]
        return f"{Path(self.options['--text']).stem}, {'no slack' if room == '0' else f'{room} slots of slack'}"


def read(file: Path) -> Run:
    text = file.read_text()
    lines = text.splitlines()
    facts = [line[2:] for line in lines if line.startswith("# ")]
    if len(facts) != 3 or ": " not in facts[0]:
        sys.exit(f"pages.py: expected three lines of facts in {file.name}, got {len(facts)}")
    title, how = facts[0].split(": ", 1)
    rows = list(csv.DictReader(x for x in lines if not x.startswith("#")))
    return Run(file.name, title, how, facts[1], facts[2], rows, text)


def number(x: float) -> str:
    """Two digits, or four behind the point."""
    return f"{x:.4f}" if x < 0.01 else f"{x:.3f}" if x < 0.1 else f"{x:.2f}"


def kl_of(row: dict[str, str]) -> str:
    error = float(row["kl_se"] or 0)
    return number(float(row["kl"])) + (f" ± {number(error)}" if error >= 0.00005 else "")


def share(run: Run, budget: str) -> float:
    """Of a 16-bit cache's bytes; evaluate's shares were of the float32 cache's until 2026-11-29."""
    half = 2 if re.search(r"\d{4}-\d\d-\d\d", run.measured)[0] < "2026-11-30" else 1
    return half * float(budget.removesuffix("%"))


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
    return table(["KL; slots per head", *(f"{share(run, b):g} %" for b in budgets)], rows)


def bytes_of(run: Run, row: dict[str, str]) -> str:
    half = next((float(r["bytes"]) for r in run.rows if r["policy"] == "full_cache/half"), None)
    return f"{100 * float(row['bytes']) / half:.0f} %" if half else ""


def whole(run: Run) -> str:
    rows = [row for row in run.rows if not row["budget"].endswith("%")]
    if not any(bytes_of(run, row) for row in rows):
        return ""
    return table(["without eviction", "bytes", "KL"], [[f"`{r['policy']}`", bytes_of(run, r), kl_of(r)] for r in rows])


def any_table(run: Run) -> str:
    """The columns of any file: errors beside their numbers, and those of one name with several budgets as one."""
    columns: dict[str, list[str]] = defaultdict(list)  # by the name that they share
    for name in run.rows[0]:
        if not name.endswith("_se"):
            base, _, last = name.rpartition("_")
            columns[base if base and last[0].isdigit() else name].append(name)

    def cell(row: dict[str, str], names: list[str]) -> str:
        shown = [(row[n] or "–") + (f" ± {row[n + '_se']}" if row.get(n + "_se") else "") for n in names]
        text = " / ".join(shown).replace("|", "\\|")
        return f"`{text}`" if names == ["policy"] else text if set(text) - set("–/ ") else "–"

    def head(base: str, names: list[str]) -> str:
        of = " / ".join(n.removeprefix(base + "_") for n in names)
        text = names[0].replace("_", " ") if len(names) == 1 else f"{base.replace('_', ' ')}, {of}"
        return re.sub(r"\b(kl|mib|kib|mb|pin)\b|(?<=\d)%", lambda m: WRITTEN.get(m[0], " %"), text)

    rows = [[cell(row, names) for names in columns.values()] for row in run.rows]
    return table([head(*c) for c in columns.items()], rows)


def section(run: Run) -> str:
    parts = [evicting(run), whole(run)] if run.examination else [any_table(run)]
    parts.append(f"*{run.how[0].upper() + run.how[1:]}; {run.measured}.*\n\n    {run.command}\n")
    return "\n".join([f"## {run.heading}\n", *filter(None, parts)])


def first_table(runs: list[Run]) -> str:
    """KL of every model that was examined on the held-out text without slack."""
    of = [r for r in runs if r.examination and r.heading == "held-out, no slack"]
    of.sort(key=lambda r: [*PAGES, r.page].index(r.page))
    rows = []
    for policy, percent in FIRST:
        name, _, stored = policy.partition("/")
        found = [next((x for x in r.rows if x["policy"] == policy and percent ==
                       (round(share(r, x["budget"])) if x["budget"].endswith("%") else None)), None) for r in of]
        if not any(found):
            continue
        size = f"{percent} %" if percent else next(bytes_of(r, x) for r, x in zip(of, found) if x)
        kl = [kl_of(x) if x else "refused" for x in found]
        rows.append([f"`{name}`" if percent else "no eviction", f"`{stored}`", size, *kl])
    models = [f"[{r.subject}](docs/results/{r.page}.md#{anchor(r.heading)})" for r in of]
    return table(["policy", "rows in", "% of a 16-bit cache", *(f"KL, {m}" for m in models)], rows)


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


NUMBER = re.compile(
    r"(?<![\w.,/-])(\d[\d,]*\d(?:\.\d+)?|\d(?:\.\d+)?|\.\d+)(?![\w-])"
    r"(\s*(?:%|points|[KMG]i?B\b|tokens/s|[mµ]?s\b))?")  # fmt: skip
NAMES = re.compile(
    r"\b(?:Eigen|Qwen|Gemma|Llama|Debian|clang|g\+\+|CUDA|PyTorch|transformers|kvpress|kvmeld|Python)[ -]?\d[\d.]*"
    r"|\d+\.\d+\.\d+|§[\d.]+|`[^`]*`|\]\([^)]*\)|C\+\+\d+")  # fmt: skip
LINK = re.compile(r"\]\([^)]*results/([\w-]+)\.md(?:#([^)]*))?\)")


def blocks(page: str) -> list[str]:
    """Paragraphs, items and tables (with the paragraph below them), without code and pictures."""
    page = re.sub(r"^```.*?^```$|^ {4}.*?$|!\[.*?\]\(.*?\)|<!--.*?-->", "", page, flags=re.DOTALL | re.MULTILINE)
    found: list[str] = []
    for block in re.split(r"\n\s*\n|\n(?=- |\d+\. )", page):
        below = found and found[-1].lstrip().startswith("|") and "\n\n" not in found[-1]
        if below and re.match(r"\s*(\*[^*]|\\)", block):
            found[-1] += "\n\n" + block
        else:
            found.append(block)
    return found


def measured(block: str) -> list[str]:
    """The measured numbers of a block, as they stand there."""
    found = []
    for line in NAMES.sub(lambda m: " " + "\n" * m[0].count("\n"), block).splitlines():
        in_table = line.lstrip().startswith("|")
        for match in NUMBER.finditer(line):
            if in_table or "." in match[1] or match[2]:
                found.append(match[1])
    return found


def unsourced(page: str, sources: dict[tuple[str, str], str], strict: bool) -> list[str]:
    wrong = []
    for block in blocks(page):
        links = LINK.findall(block)
        wrong += [f"a link to {to}.md#{at}, which is not there" for to, at in links if at and (to, at) not in sources]
        there = "\n".join(text for (of, at), text in sources.items() if (of, at) in links or (of, "") in links)
        known = [float(n.replace(",", "")) for n, _ in NUMBER.findall(there.replace("/", " ").replace("%", " % "))]
        for shown in measured(block) if links or strict else []:
            x, digits = float(shown.replace(",", "")), len(shown.partition(".")[2])
            half = 0.5001 * 10.0**-digits if digits or x >= 10 else 0  # a count is not a rounded share
            if not any(abs(x - y) <= half for y in known):
                wrong.append(f"{shown} in “{' '.join(block.split())[:60]}…”")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if a page is not of the files")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="the repository")
    options = parser.parse_args()
    pages, readme = options.root / "docs/results", options.root / "README.md"

    runs = [read(file) for file in sorted((options.root / "bench/results").glob("*.csv"))]
    of_page: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        of_page[run.page].append(run)
    made, sources = {}, {}
    for name, of in of_page.items():
        of.sort(key=lambda r: (0, r.options["--text"], -int(r.options["--room"])) if r.examination else (1,))
        head = HEAD.format(title=of[0].subject) + (EXAMINED.format(name=name) if of[0].examination else "")
        made[pages / f"{name}.md"] = "\n".join([head, *map(section, of)])
        for r in of:
            at = name, anchor(r.heading)
            sources[at] = sources.get(at, "") + section(r) + r.text
    if readme.exists():
        of_readme = {"KL": first_table(runs), "what ran where": "".join(map(any_table, of_page["tested"]))}
        made[readme] = MARKED.sub(lambda m: m[1] + of_readme[m[2]] + m[3], readme.read_text())

    if not options.check:
        for file, text in made.items():
            file.write_text(text)
        return
    stale = [f.name for f, text in made.items() if not f.exists() or f.read_text() != text]
    stale += [f.name for f in pages.glob("*.md") if f not in made]
    if stale:
        sys.exit(f"pages.py: expected pages of {options.root.name}/bench/results, got others: {', '.join(stale)}")
    written = [f for f in (readme, *sorted(options.root.glob("docs/**/*.md"))) if f.exists() and f.parent != pages]
    of_written = {str(f.relative_to(options.root)): f.read_text() for f in written}
    wrong = [f"{f}: {what}" for f, text in of_written.items() for what in unsourced(text, sources, f in STRICT)]
    if wrong:
        sys.exit("pages.py: expected numbers of the results that are linked beside them, got\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
