# SPDX-License-Identifier: MIT
"""The prompts that bench/ruler.py writes, by what a reader of their text would answer."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
TOKENS, SAMPLES = 600, 4
sys.path.insert(0, str(BENCH))
import ruler  # noqa: E402


def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, BENCH / "ruler.py", folder, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def written(folder: Path, *arguments: object) -> dict[str, list[dict]]:
    done = run(folder, "--samples", SAMPLES, *arguments)
    assert done.returncode == 0, done.stderr
    return {f.stem: [json.loads(line) for line in f.read_text().splitlines()] for f in folder.iterdir()}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    return written(tmp_path_factory.mktemp("ruler"), "--tokens", TOKENS)


def test_each_task_fills_its_tokens(tasks: dict[str, list[dict]]) -> None:
    assert set(tasks) == {"niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe"}
    for name, cases in tasks.items():
        assert len(cases) == SAMPLES
        assert len({case["context"] for case in cases}) == SAMPLES, name
        for case in cases:
            assert 0.8 * TOKENS < ruler.tokens(case["context"]) <= TOKENS, name


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_2", "niah_multikey_3"])
def test_the_key_asked_for_has_one_number(tasks: dict[str, list[dict]], task: str) -> None:
    for case in tasks[task]:
        (key,) = re.findall(r"number of (\S+) is:$", case["question"])
        facts = re.findall(r"^The special number of (\S+) is: (\S+)\.$", case["context"], re.MULTILINE)
        assert [value for name, value in facts if name == key] == case["answers"]
        assert len(facts) == 1 if task == "niah_single_1" else len(facts) > 5


def test_variables_lead_to_the_value(tasks: dict[str, list[dict]]) -> None:
    for case in tasks["vt"]:
        (value,) = re.findall(r"value (\d+):$", case["question"])
        values: dict[str, str] = {}
        for name, other, number in re.findall(r"VAR (\w+) = (?:VAR (\w+)|(\d+))", case["context"]):
            values[name] = values[other] if other else number
        assert [name for name, held in values.items() if held == value] == case["answers"]
        assert len(case["answers"]) == 5


def test_the_words_asked_for_are_the_most_frequent(tasks: dict[str, list[dict]]) -> None:
    for case in tasks["cwe"]:
        counts = Counter(re.findall(r"\d+\. (\w+)", case["context"]))
        assert {word for word, _ in counts.most_common(10)} == set(case["answers"])
        assert min(counts[word] for word in case["answers"]) > counts.most_common(11)[10][1]
    for case in tasks["fwe"]:
        counts = Counter(word for word in case["context"].split("\n")[1].split() if word != "...")
        first = counts.most_common(4)
        assert [word for word, _ in first[:3]] == case["answers"]
        assert first[2][1] > first[3][1]


def test_a_seed_says_what_is_drawn(tasks: dict[str, list[dict]], tmp_path: Path) -> None:
    assert written(tmp_path / "same", "--tokens", TOKENS) == tasks
    other = written(tmp_path / "other", "--tokens", TOKENS, "--seed", 2)
    assert all(other[name] != cases for name, cases in tasks.items())


def test_what_is_decoded_is_the_rest_of_the_context(tasks: dict[str, list[dict]], tmp_path: Path) -> None:
    parts = written(tmp_path, "--tokens", TOKENS, "--first", 200)
    for name, cases in tasks.items():
        for whole, part in zip(cases, parts[name], strict=True):
            assert part["context"] + part["question"] == whole["context"] + whole["question"]
            assert part["answers"] == whole["answers"]
            assert 150 < ruler.tokens(part["context"]) < 250


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--tokens", 20], "at least"), (["--first", 0], "--first of 1 to"), (["--tokens", 10**5], "for which there are")],
)
def test_what_cannot_be_filled_is_refused(tmp_path: Path, arguments: list[object], expected: str) -> None:
    done = run(tmp_path, "--samples", 1, *arguments)
    assert done.returncode == 1
    assert re.fullmatch(r"ruler\.py: \w+: expected .*, got .*\n", done.stderr)
    assert expected in done.stderr
