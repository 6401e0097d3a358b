#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes what Doxygen reads to build/api/source. One process: an INPUT_FILTER, started for each file, takes 15 s in all.

Headers: without their inline namespace; each option of a policy with the meaning and range of its `option(...)`; each member
that policies may have, where the header says nothing else, with what policy.hpp says of its hook; columns; members that are
`= default`. Lines stay where they are.
Pages: headings with the anchors that GitHub gives them, links as Doxygen follows them. README.md, the main page, brings the
tree of pages and the sources that pages link to.
"""
import os
import pathlib
import re
import shutil
import sys
import typing

root = pathlib.Path(__file__).resolve().parent.parent
sections = {"tutorial": "Tutorial", "how-to": "How-to guides", "reference": "Reference", "explanation": "Explanation",
            "results": "Results", "": "Project"}


# -- headers

class Hook(typing.NamedTuple):
    """A member that policies may have: its signatures, and what policy.hpp says of it."""
    name: str
    forms: list[str]
    said: str


def hooks(text: str) -> list[Hook]:
    """Those of policy.hpp."""
    found = re.findall(r"((?:^/// .*\n)+)KVMELD_HOOK\((\w+),([^;]*)\);$", text, re.M)
    return [Hook(name, [" ".join(form.split()).replace("(", f" {name}(", 1) for form in re.split(r",\s+(?=\w+\()", forms)],
                 re.sub(r"^/// ", "", said, flags=re.M).strip().replace("\n", " ")) for said, name, forms in found]


def hooks_page(known: list[Hook]) -> str:
    """Where the macro says `void` of a result that is not, `auto`."""
    text = "".join(f"- {' or '.join(f'`{form.strip()}`' for form in hook.forms)}<br>{hook.said}\n" for hook in known)
    text = re.sub(r"`void (score|mass|columns|slot_stats)\b", r"`auto \1", text).replace("columns()", "columns").replace(
        "slot_stats()", "slot_stats")
    return f"/** @page policy-members Members of a policy\nAll are const, and optional but `score` or `plan`.\n\n{text}*/\n"


def options(text: str):
    """(class, member, meaning with range) of every `option(...)`."""
    call = re.compile(r'\boption\(\s*(?:"\w+",\s*)?(?:in\([^)]*&(\w+)::(\w+)\)|&(\w+)::(\w+))(?:,\s*([^",]+),\s*([^",]+))?'
                      r'(?:,\s*((?:"[^"]*"\s*)+))?\)')
    for a, b, c, d, low, high, said in call.findall(text):
        meaning = "".join(re.findall(r'"([^"]*)"', said)) or "how a group's attention becomes one"
        if low:
            begin = {"above_0": "(0", "any_negative": "(-∞"}.get(low, f"[{low}")
            end = {"below_1": "1)", "any_number": "∞)", "endless": "∞]", "any_count": "2²⁴]", "any_seed": "2⁵³]"}
            meaning += f"; in {begin}, {end.get(high.strip(), high.strip() + ']')}"
        yield a or c, b or d, meaning[0].upper() + meaning[1:] + ("" if meaning.endswith("?") else ".")


def one_each(text: str) -> str:
    """Each of several variables that one comment describes on a line, or above it, with that comment."""
    several = re.compile(r"^( +)((?:[\w:]+(?:<[^;=]*>)? )+[*&]?)"
                         r"(\w+(?: = [^,;(]+)?(?:, \*?\w+(?: = [^,;(]+)?)+);( +///< (.*))?$")
    lines = text.split("\n")
    for at, line in enumerate(lines):
        found = several.match(line)
        said = found and (found[5] or (re.match(r" */// (.*)", lines[at - 1]) or ["", ""])[1])
        if said:
            kind, names = found[2].rstrip("*"), found[3].split(", ")
            lines[at] = found[1] + " ".join(f"{kind}{name}; /**< {said} */" for name in names)
    return "\n".join(lines)


def header(text: str, known: dict[str, str], is_policy: bool) -> str:
    text = text.replace("namespace kvmeld::inline v0", "namespace kvmeld").replace("et al. ", "et al.\\ ")  # no sentence's end
    text = re.sub(r"^/// (  \w.*(?:\n///   .*)*)", r"/// <pre>\1</pre>", text, flags=re.M)  # score, select, match
    lines, owner, after = one_each(text).split("\n"), "", ""
    for at, line in enumerate(lines):
        owner = (re.match(r"(?:struct|class) (\w+)", line) or [owner, owner])[1]
        said = None
        if "constexpr column " in line:
            for column in re.findall(r'(\w+)\{\d+, "', "\n".join(lines[at:at + 4]).partition(";")[0]):
                after += f"/** @var kvmeld::{owner}::{column}\nA number per slot, which states keep. */\n"
        elif line.endswith("= default;"):
            said = "Are all members equal?" if "operator==" in line else "As the members do."
        elif member := re.match(r"  (?!return )[\w:][\w:<>,&*]* (?:[\w:<>,&*]+ )*(\w+)(?:\(|\{|;)", line):
            said = known.get(member[1]) if is_policy else None
        if said and not re.match(r" *///", lines[at - 1]) and "///" not in line:
            lines[at] = re.sub(r"^( +)", rf"\1/** {said} */ ", line)
    for owner, member, said in options(text):
        after += f"/** @var kvmeld::{owner}::{member}\n{said} */\n"
    return "\n".join(lines) + after


# -- pages

def label(page: pathlib.Path) -> str:
    """How Doxygen's links name a page of the repository."""
    path = str(page.relative_to(root)).removeprefix("docs/").removesuffix(".md")
    return "index" if path == "README" else path.replace("/", "-")


def anchor(heading: str) -> str:
    """As GitHub names a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def target(page: pathlib.Path, link: str) -> pathlib.Path | None:
    """The file of the repository that a link of a page names."""
    if ":" in link:
        return None
    to = pathlib.Path(os.path.normpath(page.parent / link.partition("#")[0])) if link[0] != "#" else page
    if not to.exists():
        sys.exit(f"site.py: {page.relative_to(root)}: expected a link to a file, got {link}")
    return to


links = re.compile(r"\[([^\[\]]*)\]\(([^)\s]+)\)")


def without_blocks(text: str) -> list[str]:
    """What is no block of code, at even places; the blocks between."""
    return re.split(r"(^```.*?^```|^    .*?$)", text, flags=re.M | re.S)


def page_text(text: str, page: pathlib.Path) -> str:
    def follow(found: re.Match) -> str:
        said, link = found[1].replace("\n", " "), found[2]
        to = target(page, link)
        if not to:
            return f"[{said}]({link})"
        if to.is_dir():
            return said
        said = said.replace("`", "")  # Doxygen shows them
        if to.suffix == ".md":
            at = link.partition("#")[2]
            return f"[{said}](@ref {label(to)}{'-' + at if at else ''})"
        return f"[{said}]({to.name if to.suffix == '.svg' else f'@ref {to.relative_to(root)}'})"

    def name(heading: re.Match) -> str:
        own = label(page) + ("" if heading[1] == "#" else "-" + anchor(heading[2]))
        named = heading[0].replace("`", "") + ("" if own == "index" else f" {{#{own}}}")
        return named + ("\n\n[TOC]" if heading[1] == "#" else "")

    def code(span: re.Match) -> str:
        said = span[1].replace("\n", " ")
        return f"``{said}``" if "'" in said else f"`{said}`"  # with one backtick an apostrophe ends a span

    pieces = without_blocks(text)
    for i in range(0, len(pieces), 2):
        pieces[i] = re.sub(r"^(#+) (.*)$", name, links.sub(follow, pieces[i]), flags=re.M)
        pieces[i] = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", re.sub(r"`([^`]+)`", code, pieces[i]))
    return "".join(pieces)


def tree(pages: list[pathlib.Path], sources: set[pathlib.Path]) -> str:
    """The pages by folder, and the sources that they link to."""
    text = ""
    for folder, title in sections.items():
        here = root / "docs" / folder
        text += f"\n@page pages-{folder or 'project'} {title}\n"
        text += "".join(f"- @subpage {label(p)}\n" for p in pages
                        if p.parent == here or not folder and root / "docs" not in p.parents)
        text += "- @subpage policy-members\n" if folder == "reference" else ""
    return text + "".join(f"\n@example {source.relative_to(root)}\n" for source in sorted(sources))


def write(path: pathlib.Path, text: str) -> None:
    to = root / "build/api/source" / path.relative_to(root)
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(text)


def main() -> None:
    shutil.rmtree(root / "build/api", ignore_errors=True)
    policy = root / "include/kvmeld/policies/policy.hpp"
    found = hooks(policy.read_text())
    known = {hook.name: hook.said for hook in found} | {
        "name": "The policy's name, as `make_policy` reads it.",
        "options": "What may be set by text; each is a member, described there."}
    for path in (root / "include").rglob("*.h*"):
        if "detail" not in path.parts:
            is_policy = path.parent.name in ("policies", "peers") or path.name == "any_policy.hpp"
            text = header(path.read_text(), known, is_policy)
            if path == policy:
                text = text.replace("the hooks above", "@ref policy-members") + hooks_page(found)
            write(path, text)
    readme = root / "README.md"
    pages = [*sorted((root / "docs").rglob("*.md")), *(root / "cuda").glob("*.md"), root / "examples/models/README.md"]
    linked = {target(page, link) for page in [readme, *pages] for text in without_blocks(page.read_text())[::2]
              for _, link in links.findall(text)}
    sources = {to for to in linked if to and to.is_file() and to.suffix not in (".md", ".svg", ".h")}
    for source in sources:
        write(source, source.read_text())
    for page in pages:
        write(page, page_text(page.read_text(), page))
    write(readme, page_text(readme.read_text(), readme) + tree(pages, sources))


main()
