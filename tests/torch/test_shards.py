# SPDX-License-Identifier: MIT
"""A model whose heads lie on several ranks computes what one process does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
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
        bytes = sum(rank[case]["bytes"] for rank in saw)
        assert bytes == pytest.approx(one[case]["bytes"], rel=0.05)  # each rank has its own places for tokens to come
        # Of each forward the model's own two a layer, one of them to measure its rotations; and the scores of all
        # layers of each sequence of a prompt. kvzip reads its first prompt twice, and compresses no other.
        twice = case[0] == "kvzip"
        forwards = 1 + 1 + STEPS + 1 + twice
        prompts = 0 if case[1] == "even" else 2 if twice else 2 * 2
        for rank in saw:
            sizes = rank[case]["reduced"]
            assert len(sizes) == 2 * LAYERS * forwards + prompts
            assert all(LAYERS * 4 * n in sizes for n in ((200, 130) if prompts else ()))
    for policy in ("fold", "snapkv:window=8", "kvzip"):
        uneven = one[policy, "scores"]["lengths"]
        assert bool((uneven.amax(2) > uneven.amin(2)).any())
