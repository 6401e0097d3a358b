#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Write tests/data/kvzip.json: what kvpress's KVzipPress keeps of a prompt of the bundled model.

    python3 -m venv venv && venv/bin/pip install kvpress==0.5.5 torch==2.12.1 transformers==5.2.0 sentencepiece==0.2.0
    OMP_NUM_THREADS=1 venv/bin/python make_kvzip_reference.py

{tokens [prompt], words [.], kept {share: [layers * KV heads] of positions}}: `words` stand before the prompt where it is
read again. The press protects 4 sinks.
"""
import json, pathlib

import kvpress
import sentencepiece
import torch
from kvpress.presses import kvzip_press
from transformers import AutoModelForCausalLM, DynamicCache

HERE = pathlib.Path(__file__).parent
MODELS = HERE.parent.parent / "examples" / "models"
TOKENS, FIRST = 440, 5000
SHARES = [0.05, 0.1, 0.2]


class Tokenizer:
    """What the press asks of one: SentencePiece, as for the middle of a text."""

    chat_template = None

    def __init__(self):
        self.by = sentencepiece.SentencePieceProcessor(model_file=str(MODELS / "kvmeld-2m" / "tokenizer.model"))
        self.by.override_normalizer_spec(add_dummy_prefix=False, remove_extra_whitespaces=False)

    def encode(self, text, **_):
        return torch.tensor([self.by.encode(text)], dtype=torch.long)


def main():
    tokenizer = Tokenizer()
    kvzip_press.AutoTokenizer.from_pretrained = lambda *_: tokenizer
    text = (MODELS / "held-out.txt").read_text()
    tokens = tokenizer.encode(text)[:, FIRST : FIRST + TOKENS]
    model = AutoModelForCausalLM.from_pretrained(MODELS / "kvmeld-2m", dtype=torch.float32, attn_implementation="sdpa").eval()
    kept = {}
    for share in SHARES:
        press = kvpress.KVzipPress(compression_ratio=1 - share)
        with torch.no_grad(), press(model):
            model(tokens, past_key_values=DynamicCache())
        of_heads = []
        for layer in model.model.layers:
            _, heads, positions = layer.self_attn.masked_key_indices
            evicted = set(zip(heads.tolist(), positions.tolist()))
            for h in range(model.config.num_key_value_heads):
                of_heads.append([p for p in range(TOKENS) if (h, p) not in evicted])
            layer.self_attn.masked_key_indices = None
        kept[str(share)] = of_heads
        print(share, [len(x) for x in of_heads], sum(map(len, of_heads)))
    words = tokenizer.encode("\n\nRepeat the previous context exactly.")[0].tolist() + tokenizer.encode("\n")[0].tolist()
    rows = ",\n".join(f'"{share}": [' + ",\n".join(json.dumps(x) for x in of_heads) + "]" for share, of_heads in kept.items())
    (HERE / "kvzip.json").write_text(f'{{"tokens": {tokens[0].tolist()},\n"words": {words},\n"kept": {{{rows}}}}}\n')


if __name__ == "__main__":
    main()
