# SPDX-License-Identifier: MIT
"""Decode steps as one writes them in PyTorch: append, attend, score, bring back to the budget.

All heads at once, keys and values [heads, slots, dim], one query, key and value [heads, 1, dim] a step. Equations: those of
the library's include/kvmeld/policies. Each class's `step` returns the attention's output and holds as many slots as before.
"""

import torch
from torch.nn import functional as F


def without(index, *tensors):
    """The tensors [heads, slots, ...] without one slot a head, `index` [heads, 1]."""
    heads, slots = tensors[0].shape[:2]
    stays = torch.arange(slots).expand(heads, slots) != index
    kept = stays.nonzero()[:, 1].view(heads, slots - 1)
    return [
        t.gather(1, kept) if t.dim() == 2 else t.gather(1, kept.unsqueeze(-1).expand(-1, -1, t.shape[2])) for t in tensors
    ]


def least(score, first, last):
    """The slot of least score in `first .. last − 1`, [heads, 1]."""
    return score[:, first:last].argmin(dim=1, keepdim=True) + first


def at(index, tensor):
    """The rows [heads, 1, dim] of a slot a head."""
    return tensor.gather(1, index.unsqueeze(-1).expand(-1, -1, tensor.shape[2]))


def put(index, tensor, rows):
    tensor.scatter_(1, index.unsqueeze(-1).expand(-1, -1, tensor.shape[2]), rows.to(tensor.dtype))


class Attention:
    """Attention alone: what the others are measured against."""

    def __init__(self, k, v):
        self.k, self.v = k.clone(), v.clone()
        self.slots, self.scale = k.shape[1], k.shape[2] ** -0.5

    def step(self, q, k, v):
        return F.scaled_dot_product_attention(q.unsqueeze(0), self.k.unsqueeze(0), self.v.unsqueeze(0))[0]

    def append(self, k, v):
        self.k, self.v = torch.cat([self.k, k], dim=1), torch.cat([self.v, v], dim=1)

    def attend(self, q, log_mass=None):
        logits = torch.matmul(q, self.k.transpose(1, 2)).squeeze(1) * self.scale
        p = torch.softmax(logits if log_mass is None else logits + log_mass, dim=-1)
        return torch.matmul(p.unsqueeze(1).to(self.v.dtype), self.v), p, logits


class H2O(Attention):
    """Heavy hitters: cumulative attention; half of the slots are the latest."""

    def __init__(self, k, v):
        super().__init__(k, v)
        self.score = torch.zeros(k.shape[:2])

    def step(self, q, k, v):
        self.append(k, v)
        self.score = F.pad(self.score, (0, 1))
        out, p, _ = self.attend(q)
        self.score += p
        leaving = least(self.score, 4, self.slots + 1 - self.slots // 2)
        self.k, self.v, self.score = without(leaving, self.k, self.v, self.score)
        return out


class ZSMerge(Attention):
    """A tenth of the slots are the latest, slot 0 the residual one that takes in what leaves (eqs. 5–8)."""

    alpha, decay = 0.6, 0.98

    def __init__(self, k, v):
        super().__init__(k, v)
        self.score, self.weight = torch.zeros(k.shape[:2]), torch.ones(k.shape[:2])

    def step(self, q, k, v):
        self.append(k, v)
        self.score, self.weight = F.pad(self.score, (0, 1)), F.pad(self.weight, (0, 1), value=1.0)
        out, p, _ = self.attend(q, self.alpha * self.weight.log())
        self.score = self.decay * self.score + p
        c = least(self.score, 5, self.slots + 1 - self.slots // 10)
        dots = torch.matmul(self.k[:, :1], at(c, self.k).transpose(1, 2)).squeeze(-1)
        r = dots.argmax(dim=1, keepdim=True)
        w = self.weight.gather(1, r)
        for rows in (self.k, self.v):
            put(r, rows, (w.unsqueeze(-1) * at(r, rows) + at(c, rows)) / (w.unsqueeze(-1) + 1))
        self.weight.scatter_(1, r, w + 1)
        self.score.scatter_(1, r, torch.maximum(self.score.gather(1, r), self.score.gather(1, c)))
        self.k, self.v, self.score, self.weight = without(c, self.k, self.v, self.score, self.weight)
        return out


class KeepKV(Attention):
    """Votes, and merging that leaves the expected output as it is; s = exp(logit) by moving average (theorem 3, eq. 8)."""

    decay, similarity = 0.9, 0.8

    def __init__(self, k, v):
        super().__init__(k, v)
        self.average, self.votes = torch.ones(k.shape[:2]), torch.ones(k.shape[:2])
        self.age = torch.ones(k.shape[:2])

    def step(self, q, k, v):
        self.append(k, v)
        self.average, self.age = F.pad(self.average, (0, 1)), F.pad(self.age, (0, 1)) + 1
        self.votes = F.pad(self.votes, (0, 1), value=1.0)
        out, _, logits = self.attend(q, self.votes.log())
        self.average = self.decay * self.average + (1 - self.decay) * logits.exp()
        s = self.average / (1 - self.decay**self.age)
        e = least(self.votes * s, 4, self.slots + 1 - self.slots // 2)
        cosine = F.cosine_similarity(self.k, at(e, self.k), dim=-1).scatter(1, e, -2.0)
        u, c = cosine.max(dim=1, keepdim=True)
        p_e, p_c, s_e, s_c = self.votes.gather(1, e), self.votes.gather(1, c), s.gather(1, e), s.gather(1, c)
        w_e, w_c, votes = p_e * s_e, p_c * s_c, p_e + p_c
        ratio = (w_e + w_c) * ((w_e + w_c) / votes).log() / (w_e * s_e.log() + w_c * s_c.log())
        ratio = torch.where((ratio >= 0.5) & (ratio <= 2), ratio, torch.ones_like(ratio)).unsqueeze(-1)
        merges = u >= self.similarity
        share = (w_e / (w_e + w_c)).unsqueeze(-1)
        for rows, factor in ((self.k, ratio), (self.v, 1.0)):
            merged = factor * (share * at(e, rows) + (1 - share) * at(c, rows))
            put(c, rows, torch.where(merges.unsqueeze(-1), merged, at(c, rows)))
        self.votes.scatter_(1, c, torch.where(merges, votes, p_c))
        self.k, self.v, self.average, self.votes, self.age = without(
            e, self.k, self.v, self.average, self.votes, self.age
        )
        return out


def check():
    """What every step must do: attend to all of its slots and the newcomer, and return to its size."""
    torch.manual_seed(0)
    k, v = torch.randn(3, 64, 8), torch.randn(3, 64, 8)
    for kind in (H2O, ZSMerge, KeepKV):
        steps = kind(k, v)
        for _ in range(20):
            q, new_k, new_v = torch.randn(3, 3, 1, 8).unbind(0)
            keys, values = torch.cat([steps.k, new_k], dim=1), torch.cat([steps.v, new_v], dim=1)
            mass = torch.zeros(3, 64)
            if kind is ZSMerge:
                mass = kind.alpha * steps.weight.log()
            elif kind is KeepKV:
                mass = steps.votes.log()
            wanted = F.scaled_dot_product_attention(q, keys, values, attn_mask=F.pad(mass, (0, 1)).unsqueeze(1))
            torch.testing.assert_close(steps.step(q, new_k, new_v), wanted)
            assert steps.k.shape == k.shape and steps.v.shape == v.shape
        if kind is ZSMerge:
            assert torch.all(steps.weight.sum(dim=1) == 64 + 20), "every token that came is in the mass"
