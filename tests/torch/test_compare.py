# SPDX-License-Identifier: MIT
"""python -m kvmeld_torch.compare on few prompts."""

import csv
import inspect
import os
import subprocess
import sys

import pytest
import torch
from conftest import MODEL, ROOT
from kvmeld_torch import compare, measures
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

pytestmark = pytest.mark.skipif(
    "cache" in inspect.signature(LlamaDecoderLayer.forward).parameters,
    reason="kvpress 0.5 expects a version of transformers that calls the cache past_key_values",
)


def test_the_table_says_what_was_measured(tmp_path, capsys):
    compare.main(
        "--policies full_cache,h2o --presses KnormPress --budgets 0.5 --prompt 300 --prompts 1 --cases 2 "
        f"--out {tmp_path}".split()
    )
    with (tmp_path / "compare.csv").open() as file:
        table = {r["method"]: r for r in csv.DictReader(file)}
    assert list(table) == ["full cache", "full_cache", "h2o", "KnormPress"]
    assert list(table["h2o"]) == compare.FIELDS
    full, same, h2o, press = ({k: float(x) for k, x in r.items() if k != "method"} for r in table.values())
    assert full["error"] == 0 and same["error"] < 1e-4 < h2o["error"] < press["error"] + 1
    assert abs(full["nll"] - same["nll"]) < 1e-4
    assert full["needles"] == same["needles"]
    # 4 layers, 4 KV heads, 32 numbers of a key and of a value, in float32; kvmeld's slots have 8 or 12 bytes more, and
    # each head has places for 9 tokens to come and the next.
    assert full["bytes"] == 300 * 4 * 4 * 64 * 4
    assert press["bytes"] == full["bytes"] / 2
    heads = 16 * 8, 16 * 32  # lengths, and what was measured
    assert (h2o["ranks"], h2o["rank_slots"]) == (1, 160 * 16 * 264 + heads[0])
    assert h2o["rank_state"] == h2o["bytes"] - h2o["rank_slots"] == 160 * 16 * 4 + heads[1]
    assert (tmp_path / "compare.svg").read_text().startswith("<?xml")
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_ranks_measure_what_one_process_does(tmp_path):
    """Each of two ranks holds half; a press that needs all query heads is left out in one line."""
    asked = "--policies fold,kvzip --presses KnormPress,SnapKVPress --budgets 0.2 --prompt 200 --prompts 1 --cases 1"
    table, said = {}, {}
    for ranks in (1, 2):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if ranks == 2 else []
        out = tmp_path / str(ranks)
        command = [sys.executable, *launch, "-m", "kvmeld_torch.compare", *asked.split(), "--out", str(out)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "examples/torch")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        said[ranks] = done
        with (out / "compare.csv").open() as file:
            table[ranks] = {r.pop("method"): {k: float(x) for k, x in r.items()} for r in csv.DictReader(file)}
    (left_out,) = [line for line in said[2].stderr.splitlines() if "left out" in line]
    assert left_out.startswith("SnapKVPress 0.2: left out on ranks: ")
    assert len(said[2].stdout.splitlines()) == 2 + 4
    one = {k: r for k, r in table[1].items() if k != "SnapKVPress"}
    assert list(table[2]) == list(one)
    for name, mine in table[2].items():
        assert mine["ranks"] == 2
        for field in ("error", "nll"):
            assert mine[field] == pytest.approx(one[name][field], rel=1e-4, abs=1e-6), name
        assert mine["needles"] == one[name]["needles"], name
        assert mine["bytes"] == pytest.approx(one[name]["bytes"], rel=0.02), name  # places for tokens to come
        shared = name in ("fold", "kvzip")  # whose heads are of other sizes on each rank
        for field in ("rank_slots", "rank_state"):
            half = one[name][field] / 2
            assert mine[field] > half - 1 if shared else mine[field] == half
    assert table[2]["kvzip"]["rank_slots"] > one["kvzip"]["rank_slots"] / 2


def test_a_needle_is_in_its_prompt(text):
    encode, decode = compare.tokenizer(MODEL)
    for seed in range(5):
        body, question, code = compare.needle_case(encode, text, 600, 4, seed)
        assert len(body) == 600
        name = decode(question).split(" of ")[1].split("?")[0]
        assert decode(body).count(f"The secret code of {name} is {code}.") == 1
        assert decode(body).count("The secret code of") == 4


def test_a_question_is_answered_from_the_full_cache(plain, text):
    """Most of them, as the bundled model does; read behind a press's cache of all tokens as behind a policy's."""
    encode, decode = compare.tokenizer(MODEL)
    answers = {}
    with torch.no_grad():
        for method in (measures.FULL, measures.policy("full_cache", 1.0, encode), measures.press("KnormPress", 1.0)):
            right = []
            for seed in range(4):
                body, question, code = compare.needle_case(encode, text, 500, 2, seed)
                cache, _, _ = method.prefill(plain, torch.tensor([body]))
                answer = method.answer(plain, cache, torch.tensor([question]), len(body), 12)
                right.append(decode(answer).strip().startswith(code))
            answers[method.name] = right
    plain.set_attn_implementation("sdpa")
    assert sum(answers["full cache"]) >= 3
    assert answers["full_cache"] == answers["KnormPress"] == answers["full cache"]
