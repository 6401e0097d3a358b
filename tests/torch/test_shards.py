# SPDX-License-Identifier: MIT
"""A model whose heads lie on several ranks computes what one process does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kvmeld_torch.budgets import divide, histogram
from shards import CASES, LAYERS, STEPS

PROGRAM = Path(__file__).parent / "shards.py"


def run(folder: Path, ranks: int) -> list[dict]:
    """What every rank saw; of one process without ranks for `ranks` 0."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, *launch, str(PROGRAM), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    names = range(ranks) if ranks else ["one"]
    return [torch.load(folder / f"{name}.pt") for name in names]


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> dict:
    return run(tmp_path_factory.mktemp("one"), 0)[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_compute_what_one_process_does(ranks, one, tmp_path):
    saw = run(tmp_path, ranks)
    for case in CASES:
        for rank in saw:
            wanted = one[case]["logits"]
            torch.testing.assert_close(rank[case]["logits"], wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)
        lengths = torch.cat([rank[case]["lengths"] for rank in saw], 2)
        assert torch.equal(lengths, one[case]["lengths"]), case
        assert sum(rank[case]["bytes"] for rank in saw) == one[case]["bytes"]
        # Of each forward the model's own two a layer; and a histogram of a sequence of a prompt. kvzip reads its
        # first prompt twice, and has one histogram of all layers.
        twice = case[0] == "kvzip"
        forwards = 1 + STEPS + 1 + twice
        histograms = 0 if case[1] == "even" else 2 if twice else LAYERS * 2 * 2
        for rank in saw:
            sizes = rank[case]["reduced"]
            assert len(sizes) == 2 * LAYERS * forwards + histograms
            assert sum(n == (LAYERS if twice else 1) * 4 * 4096 for n in sizes) == histograms
    for policy in ("snapkv:window=8", "kvzip"):
        uneven = one[policy, "scores"]["lengths"]
        assert bool((uneven.amax(2) > uneven.amin(2)).any())


def by_loops(scores: torch.Tensor, total: int, floor: int) -> list[int]:
    """AdaKV's division of the exact scores."""
    heads = range(scores.shape[0])
    order = [sorted(scores[h].tolist(), reverse=True) for h in heads]
    rest = sorted(((x, h) for h in heads for x in order[h][floor:]), reverse=True)[: total - floor * len(heads)]
    return [floor + sum(owner == h for _, owner in rest) for h in heads]


def whole(scores: torch.Tensor) -> torch.Tensor:
    return histogram(scores, torch.full((scores.shape[0],), scores.shape[1]))


@pytest.mark.parametrize("seed", range(5))
def test_a_division_by_histogram_is_ada_kv_s_but_for_one_bin(seed):
    torch.manual_seed(seed)
    heads, slots, total, floor = 6, 500, 900, 30
    scores = (torch.randn(heads, slots) * torch.rand(heads, 1) * 3).exp()
    counts = whole(scores)
    assert counts.sum(1).tolist() == [slots] * heads
    mine, wanted = divide(counts, total, floor), by_loops(scores, total, floor)
    assert sum(mine) == total and min(mine) >= floor
    assert max(mine) > 2 * min(mine)
    threshold = sorted(scores.flatten().tolist(), reverse=True)[total - 1]
    for h in range(heads):
        near = int(((scores[h] > threshold / 1.14) & (scores[h] < threshold * 1.14)).sum())  # its bin, or the next
        assert abs(mine[h] - wanted[h]) <= near


def test_scores_of_few_values_are_divided_exactly():
    """One value a bin: what AdaKV gives, ties shared."""
    scores = torch.tensor([[8.0, 4.0, 2.0, 1.0], [8.0, 8.0, 8.0, 1.0], [0.5, 0.5, 0.0, -1.0]])
    assert divide(whole(scores), 6, 1) == [2, 3, 1]
    assert divide(whole(scores), 4, 0) == [1, 3, 0]
    assert divide(whole(scores), 6, 0) == [3, 3, 0]
    assert divide(whole(scores), 12, 0) == [4, 4, 4]
    assert divide(whole(scores), 18, 0) == [6, 6, 6]  # more than there are
    assert divide(histogram(scores, torch.tensor([4, 1, 2])), 4, 1) == [2, 1, 1]
    assert whole(torch.tensor([[float("nan"), -1.0, 0.0]]))[0, -1] == 3
    with pytest.raises(ValueError, match="expected at least 3 slots for each of 3 heads, got 8 in total"):
        divide(whole(scores), 8, 3)
