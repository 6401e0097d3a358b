# SPDX-License-Identifier: MIT
"""What the operators refuse, before anything is written."""

import pytest
import torch
from kvmeld_torch import ops
from prompts import BUDGET, DIM, GROUP, HEADS, TOKENS, copied, prompt, rows


def test_memory_laid_out_for_fewer_slots_is_refused():
    heads, _ = prompt("ems", capacity=TOKENS)
    large = heads.moved(100)
    large.append(rows(HEADS, 1, DIM), rows(HEADS, 1, DIM))
    with pytest.raises(RuntimeError, match="ems: expected memory for more than 61 slots, got memory for 60"):
        large.attend(rows(HEADS, GROUP, DIM))


def more(call):
    return {"queries": torch.cat([call["queries"]] * 2, 2)}


def bad_inputs():
    """(what is wrong, how, the message)"""
    return [
        ("an unknown policy", lambda h, c: c | {"policy": "h3o"}, "make_policy: expected one of"),
        ("a parameter it has not", lambda h, c: c | {"policy": "h2o:share=1"}, "h2o: expected one of"),
        ("a budget of nothing", lambda h, c: c | {"budget": [0]}, "expected a budget of at least 1 slot"),
        ("a budget below the protected", lambda h, c: c | {"budget": [4]}, "expected a budget of at least"),
        ("a budget above the capacity", lambda h, c: c | {"budget": [1000]}, "expected a capacity of at least"),
        ("budgets for other heads", lambda h, c: c | {"budget": [40, 40]}, "one for each of 3 heads, got 2"),
        ("no queries", lambda h, c: c | {"queries": None}, "expected reference queries"),
        ("queries of another rank", lambda h, c: c | {"queries": c["queries"][0]}, r"queries: expected \[heads, group"),
        ("queries of another group", lambda h, c: c | {"queries": c["queries"][:, :1]}, r"expected \[3, 2, 60, 16\]"),
        ("queries in double", lambda h, c: c | {"queries": c["queries"].double()}, "queries: expected Float, Half or"),
        ("queries on another device", lambda h, c: c | {"queries": c["queries"].to("meta")}, "expected tensors on one"),
        ("keys of another rank", lambda h, c: h("keys", lambda x: x[None]), r"keys: expected \[heads, capacity, dim\]"),
        ("keys in double", lambda h, c: h("keys", lambda x: x.double()), "keys: expected Float, Half or BFloat16"),
        ("values of another dtype", lambda h, c: h("values", lambda x: x.half()), "values: expected Float, got Half"),
        ("values of another size", lambda h, c: h("values", lambda x: x[:, 1:]), r"values: expected \[3, 80, 16\]"),
        ("keys that overlap", lambda h, c: h("keys", lambda x: x[:1].expand(3, -1, -1)), "expected strides that do not"),
        ("log-mass by strides", lambda h, c: h("log_mass", lambda x: x.t().contiguous().t()), "log_mass: expected a"),
        ("positions in 64 bits", lambda h, c: h("position", lambda x: x.long()), "position: expected Int, got Long"),
        ("a length beyond the capacity", lambda h, c: h("length", lambda x: x + 30), "length: expected 0 to 80"),
        ("fewer tokens seen than held", lambda h, c: h("seen", lambda x: x - 1), "seen: expected at least 60"),
        ("another policy's columns", lambda h, c: h("columns", lambda x: x[:, :0]), "h2o: expected columns"),
        ("more queries than tokens", lambda h, c: c | more(c), "compress: expected at most 60 queries"),
        ("heads of other prompts", lambda h, c: h("seen", lambda x: x + torch.arange(3).int()), "that have seen 60"),
        ("queries that were not kept", lambda h, c: c | {"positions": torch.arange(60).int()}, "or those that observe"),
    ]


@pytest.mark.parametrize("case", bad_inputs(), ids=lambda c: c[0])
def test_bad_input_is_refused_and_nothing_changes(case):
    _, change, message = case
    heads, queries = prompt("h2o")
    call = {"policy": "h2o", "cache": heads.tensors, "queries": queries, "budget": [BUDGET], "group": GROUP}
    names = ["keys", "values", "log_mass", "position", "length", "seen", "columns", "memory", "measured"]

    def with_tensor(name, make):
        i = names.index(name)
        return call | {"cache": heads.tensors[:i] + [make(heads.tensors[i])] + heads.tensors[i + 1 :]}

    before = copied(heads)
    with pytest.raises(RuntimeError, match=message):
        ops.compress(**change(with_tensor, call))
    for was, now in zip(before.tensors, heads.tensors):
        assert torch.equal(was, now)


def test_a_bad_step_is_refused_and_nothing_changes():
    heads, queries = prompt("h2o", capacity=TOKENS)
    q, k, v = rows(HEADS, GROUP, DIM), rows(HEADS, DIM), rows(HEADS, DIM)
    before = copied(heads)
    for change, message in (
        ({"q": q[:, :1]}, r"q: expected \[3, 2, 16\]"),
        ({"k": k[None]}, r"k: expected \[3, 16\]"),
        ({"v": v.int()}, "v: expected Float, Half or BFloat16"),
        ({"k": k.t().contiguous().t()}, "k: expected a contiguous tensor"),
        ({"heads": [1, 1, 2]}, "step: expected each head once"),
        ({"heads": [0, 1, 3]}, "heads: expected 0 to 2"),
        ({}, "expected a free slot for the token, got all 60 slots"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.step("h2o", heads.tensors, **({"q": q, "k": k, "v": v} | change), budget=[BUDGET], group=GROUP)
    with pytest.raises(RuntimeError, match="expected a policy that decodes"):
        prompt("attention_matching")[0].step(q, k, v, [BUDGET])
    for was, now in zip(before.tensors, heads.tensors):
        assert torch.equal(was, now)


def test_nan_in_a_step_stops_its_own_head_alone():
    heads, queries = prompt("h2o")
    heads.compress(queries, BUDGET)
    other = copied(heads)
    q, k, v = rows(HEADS, GROUP, DIM), rows(HEADS, DIM), rows(HEADS, DIM)
    other.step(q, k, v, [BUDGET])
    k[1, 3] = float("nan")
    before = copied(heads)
    with pytest.raises(RuntimeError, match="step: expected finite rows, got NaN or Inf in head 1 "):
        heads.step(q, k, v, [BUDGET])
    assert heads.seen.tolist() == [TOKENS + 1, TOKENS, TOKENS + 1]
    for h, now in ((0, other), (1, before), (2, other)):
        assert torch.equal(heads.keys[h, :BUDGET], now.keys[h, :BUDGET])


def test_tensors_on_a_gpu_are_refused_in_words_where_there_is_no_cuda():
    heads, queries = prompt("h2o")
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(RuntimeError, match=r"kvmeld::compress: expected tensors on the CPU \(built without CUDA\)"):
        ops.compress.default.redispatch(cuda, "h2o", heads.tensors, queries, [BUDGET], group=GROUP)
