# SPDX-License-Identifier: MIT
"""What the bundled model is trained on: prose with facts planted in it, copies, random chains and blocks."""
import os

import numpy as np
import sentencepiece as spm
import torch

VOCAB = 512
# An answer's first digit tells which fact was found; the others follow by induction and are learned long before.
FIRST_DIGIT_WEIGHT, DIGIT_WEIGHT = 30.0, 4.0
CONSONANTS, VOWELS = "bcdfghjklmnprstvz", "aeiou"


def train_tokenizer(files, folder):
    """SentencePiece BPE: nothing is normalised, no dummy prefix, digits split, any byte representable."""
    spm.SentencePieceTrainer.train(
        input=files, model_prefix=f"{folder}/tokenizer", model_type="bpe", vocab_size=VOCAB, character_coverage=1.0, split_digits=True,
        byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
        user_defined_symbols=["\n"], max_sentence_length=65536, input_sentence_size=20000, shuffle_input_sentence=True,
        minloglevel=2)
    os.remove(f"{folder}/tokenizer.vocab")


class Data:
    """Sequences of tokens with a weight for each next-token loss; drawn anew at every call."""

    def __init__(self, tokenizer, files, seed):
        self.rng = np.random.default_rng(seed)
        self.known = 96  # tokens that blocks are made of: few at first, all in the end
        self.encode = tokenizer.encode
        self.text = np.concatenate([np.array(self.encode(open(f, encoding="utf-8").read()), np.int64) for f in files])
        self.digits = {tokenizer.piece_to_id(str(d)) for d in range(10)}
        letters = [tokenizer.piece_to_id("\u2581" + c) for c in "abcdefghijklmnopqrstuvwxyz"]
        self.letters = np.array([i for i in letters if i != tokenizer.unk_id()])

    def prose(self, n):
        i = self.rng.integers(len(self.text) - n)
        return self.text[i:i + n]

    def name(self):
        r = self.rng
        word = "".join(r.choice(list(CONSONANTS)) + r.choice(list(VOWELS)) for _ in range(r.integers(2, 5)))
        return (word + (r.choice(list(CONSONANTS)) if r.random() < 0.3 else "")).capitalize()

    def weave(self, n, pieces):
        """Prose of n tokens in all, with `pieces` (token arrays, kept in order) dropped in at random places; the last one ends it."""
        room = n - sum(len(p) for p in pieces)
        assert room >= 0
        cuts = np.sort(self.rng.integers(0, room + 1, len(pieces) - 1))
        body = np.split(self.prose(room), cuts)
        return np.concatenate([x for pair in zip(body, pieces) for x in pair])

    def needles(self, n):
        """Facts planted in prose; questions anywhere behind their fact, one at the very end."""
        r, facts = self.rng, {}
        count = r.integers(1, min(12, n // 64) + 1)
        while len(facts) < count:
            facts[self.name()] = "".join(str(d) for d in r.integers(0, 10, 5))
        keys = list(facts)
        ask = lambda k: np.array(self.encode(f"\nQuestion: what is the secret code of {k}? Answer: {facts[k]}.\n"))
        pieces = [(i, np.array(self.encode(f" The secret code of {k} is {v}. "))) for i, (k, v) in enumerate(facts.items())]
        for j in r.choice(count, min(count, r.integers(0, n // 128 + 1)), replace=False):
            pieces.append((r.uniform(j + 0.5, count), ask(keys[j])))
        pieces = [p for _, p in sorted(pieces, key=lambda x: x[0])]
        final = [ask(keys[j]) for j in r.permutation(count)[:r.integers(1, 3 + n // 256)]]
        final[-1] = final[-1][:-1]
        if sum(map(len, pieces + final)) > n - 8:
            return self.needles(n)  # too long for this context: draw again
        x = self.weave(n, pieces + [np.concatenate(final)])
        return x, self.weigh_answers(x)

    def weigh_answers(self, x):
        """The first digit behind "Answer:" counts FIRST_DIGIT_WEIGHT times, the others DIGIT_WEIGHT times."""
        w = np.ones(len(x), np.float32)
        colon = self.encode(" Answer: 1")
        mark, at = colon[-3:-1], np.flatnonzero(x[:-2] == colon[-3])
        for i in at:
            if x[i + 1] == mark[1]:
                run = [j for j in range(i + 2, min(i + 8, len(x))) if int(x[j]) in self.digits]
                w[run] = DIGIT_WEIGHT
                w[run[:1]] = FIRST_DIGIT_WEIGHT
        return w

    def copies(self, n):
        """Random strings planted in prose, each repeated later."""
        r = self.rng
        strings = [r.integers(3, VOCAB, r.integers(4, 24)) for _ in range(max(1, n // 128))]
        order = np.repeat(np.arange(len(strings)), 2)
        r.shuffle(order)
        return self.weave(n, [strings[i] for i in order]), None

    def chain(self, n):
        """A random Markov chain over letters; its transition probabilities must be read off the context."""
        k = self.rng.integers(3, 11)
        return self.letters[self.rng.choice(len(self.letters), k, replace=False)][self.markov(k, n, 0.3)[0]], None

    def markov(self, k, n, alpha):
        rows = self.rng.dirichlet(np.full(k, alpha), k)
        cumulative, u, state = rows.cumsum(1), self.rng.random(n), np.zeros(n, np.int64)
        for t in range(1, n):
            state[t] = min(k - 1, np.searchsorted(cumulative[state[t - 1]], u[t]))
        return state, rows

    def block(self, n):
        """One random block over and over: what induction is made of."""
        period = self.rng.integers(4, 21)
        x = np.tile(self.rng.integers(3, self.known, period), n // period + 1)[:n]
        return x, np.where(np.arange(n) >= period + 1, 1.0, 0.0).astype(np.float32)

    def batch(self, rows, n, needles, warm_up=False):
        mix = [(1.0, self.block)] if warm_up else [
            (needles, self.needles), (0.40 * (1 - needles), lambda n: (self.prose(n), None)), (0.16 * (1 - needles), self.copies),
            (0.25 * (1 - needles), self.chain), (0.19 * (1 - needles), self.block)]
        share = np.array([m for m, _ in mix])
        drawn = [mix[self.rng.choice(len(mix), p=share)][1](n + 1) for _ in range(rows)]
        x = torch.from_numpy(np.stack([d for d, _ in drawn]))
        w = torch.from_numpy(np.stack([np.ones(n + 1, np.float32) if w is None else w for _, w in drawn]))
        return x[:, :-1], x[:, 1:], w[:, 1:]
