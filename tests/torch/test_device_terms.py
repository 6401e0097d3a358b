# SPDX-License-Identifier: MIT
"""A GPU's operators with what a model's attention computes: soft caps and sinks, all heads, some, or in pages."""

import pytest
import torch
from devices import KERNELS, device, in_pages, near  # noqa: F401
from kvmeld_torch import Spec
from prompts import BUDGET, DIM, GROUP, HEADS, prompt, rows

# Logits are about 1, and every query head's sink is another.
CAPPED = Spec(GROUP, soft_cap=2.0, sinks=(-1.5, 1.0, 0.5, -0.5, 2.0, 0.0))


@pytest.mark.parametrize("policy", [x for x in KERNELS if x not in ("ems", "fold")])
def test_soft_caps_and_sinks(device, policy):
    here, queries = prompt(policy)
    here.spec = CAPPED
    here = here.chosen(torch.tensor([0, 1, 2, 2, 1, 0]))  # two sequences of a layer: sinks are by head of one
    queries = torch.cat([queries, rows(*queries.shape)])
    there = device.heads(here)
    for heads in (here, there):
        heads.compress(queries, BUDGET)
    near(here, there)
    for _ in range(4):
        q, k, v = rows(2 * HEADS, GROUP, DIM), rows(2 * HEADS, DIM), rows(2 * HEADS, DIM)
        out = [heads.step(q, k, v, [BUDGET]) for heads in (here, there)]
        torch.testing.assert_close(*out, atol=2e-5, rtol=2e-5)
    near(here, there)


@pytest.mark.parametrize("policy", ["ems", "fold"])
@pytest.mark.parametrize("term", ["soft_cap", "sinks"])
def test_terms_that_a_policy_does_without_are_refused(device, policy, term):
    here, queries = prompt(policy)
    here.spec = Spec(GROUP, **{term: getattr(CAPPED, term)})
    there = device.heads(here)
    name = "soft_cap" if term == "soft_cap" else "sink_logits"
    with pytest.raises(RuntimeError, match=f"expected no {name} .not carried out by {policy} kernels"):
        there.compress(queries, BUDGET)
    assert torch.equal(here.keys, there.keys) and torch.equal(here.length, there.length)


@pytest.mark.parametrize("spec", [Spec(GROUP), CAPPED])
def test_attention(device, spec):
    here, _ = prompt("h2o")
    here.spec = spec
    here.length[:] = torch.tensor([1, 17, 60])
    here.log_mass[:] = torch.randn_like(here.log_mass)
    there = device.heads(here)
    q = rows(HEADS, GROUP, DIM)
    for a, b in zip(here.attend(q, probabilities=True), there.attend(q, probabilities=True)):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
    assert there.attend(q)[2].numel() == 0


@pytest.mark.parametrize("together", [1, HEADS])
def test_attention_in_pages(device, together):
    here, _ = prompt("h2o")
    here.spec = CAPPED
    here = here.chosen(torch.tensor([0, 1, 2, 2, 1, 0]))
    here.length[:] = torch.tensor([1, 17, 60, 64, 33, 8])
    there, q = device.heads(here).heads, device.tensor(rows(2 * HEADS, GROUP, DIM))
    pages = in_pages(there, together)
    pages[8][:, 8:] = -1  # no slots there
    for a, b in zip(
        *(device.ops.attend("h2o", x, q, probabilities=True, **there.spec.options) for x in (there.tensors, pages))
    ):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


@pytest.mark.parametrize("spec", [Spec(GROUP), CAPPED])
def test_places_are_read_on_the_device(device, spec):
    here, queries = prompt("h2o")
    here.spec = spec
    there = device.heads(here)
    for heads in (here, there):
        heads.compress(queries, BUDGET)
    token = [rows(2, GROUP, DIM), rows(2, DIM), rows(2, DIM)]
    call = ["h2o", there.heads.tensors, *map(device.tensor, token), [BUDGET]]
    places = {"places": device.tensor(torch.tensor([2, -1]).int())} | there.heads.spec.options
    out = here.step(*(x[:1] for x in token), [BUDGET], heads=[2]), device.ops.step(*call, **places)[:1].cpu()
    torch.testing.assert_close(*out, atol=2e-5, rtol=2e-5)
    near(here, there)
    with pytest.raises(RuntimeError, match="expected heads or places, got both"):
        device.ops.step(*call, heads=[0, 1], **places)
