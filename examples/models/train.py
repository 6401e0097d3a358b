#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Train the bundled model: a small llama-family decoder that retrieves, copies and counts over its whole context.

    python3 -m venv venv && venv/bin/pip install -r requirements.txt
    venv/bin/python train.py --corpus DIR --out kvmeld-5m --minutes 120

DIR holds plain text files; files named held-out-* are never read. Interrupt and start again at will: the state is saved beside
the model every few minutes and training goes on from there. The result is a Hugging Face llama checkpoint (config.json,
model.safetensors in bfloat16, tokenizer.model).
"""
import argparse, glob, json, math, os, time

import numpy as np
import sentencepiece as spm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from train_data import FIRST_DIGIT_WEIGHT, VOCAB, Data, train_tokenizer

WIDTH, LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, ROPE_BASE = 256, 4, 8, 4, 32, 512, 10000.0
# (share of the time, context, sequences a step, share of needles): the context grows, and needles end it
STAGES = [(0.06, 128, 36, 0.37), (0.15, 256, 18, 0.37), (0.25, 512, 9, 0.37), (0.32, 1152, 4, 0.37), (0.22, 1152, 4, 0.85)]


# ---------------------------------------------------------------- the model
def rotate(x, cos, sin):
    """RoPE, half-split layout; x [batch, heads, time, DIM]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        linear = lambda i, o: torch.nn.Linear(i, o, bias=False)
        self.norm1, self.norm2 = torch.nn.Parameter(torch.ones(WIDTH)), torch.nn.Parameter(torch.ones(WIDTH))
        self.qkv, self.out = linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM), linear(HEADS * DIM, WIDTH)
        self.gate_up, self.down = linear(WIDTH, 2 * HIDDEN), linear(HIDDEN, WIDTH)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q, k, v = self.qkv(norm(x, self.norm1)).view(b, t, -1, DIM).transpose(1, 2).split([HEADS, KV_HEADS, KV_HEADS], 1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1))
        gate, up = self.gate_up(norm(x, self.norm2)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = torch.nn.Parameter(torch.ones(WIDTH))
        for name, p in self.named_parameters():
            if p.dim() > 1:
                torch.nn.init.normal_(p, std=0.02 / (math.sqrt(2 * LAYERS) if "out." in name or "down." in name else 1))

    def forward(self, tokens):
        t = tokens.shape[1]
        angle = torch.arange(t)[:, None] * ROPE_BASE ** (-torch.arange(0, DIM, 2) / DIM)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, angle.cos(), angle.sin())
        return F.linear(norm(x, self.norm), self.embed.weight)


def export(model, folder):
    """Write the checkpoint under Hugging Face's names."""
    named = {"model.embed_tokens.weight": model.embed.weight, "model.norm.weight": model.norm}
    for i, l in enumerate(model.layers):
        at = f"model.layers.{i}."
        q, k, v = l.qkv.weight.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM])
        gate, up = l.gate_up.weight.chunk(2)
        named |= {at + "self_attn.q_proj.weight": q, at + "self_attn.k_proj.weight": k, at + "self_attn.v_proj.weight": v,
                  at + "self_attn.o_proj.weight": l.out.weight, at + "mlp.gate_proj.weight": gate, at + "mlp.up_proj.weight": up,
                  at + "mlp.down_proj.weight": l.down.weight, at + "input_layernorm.weight": l.norm1,
                  at + "post_attention_layernorm.weight": l.norm2}
    save_file({n: p.detach().to(torch.bfloat16).contiguous().clone() for n, p in named.items()}, f"{folder}/model.safetensors",
              {"format": "pt"})
    config = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", hidden_size=WIDTH, intermediate_size=HIDDEN,
                  num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM, vocab_size=VOCAB,
                  rms_norm_eps=1e-5, rope_theta=ROPE_BASE, tie_word_embeddings=True, attention_bias=False, mlp_bias=False,
                  max_position_embeddings=STAGES[-1][1], torch_dtype="bfloat16")
    with open(f"{folder}/config.json", "w") as f:
        f.write(json.dumps(config, indent=2) + "\n")


# ---------------------------------------------------------------- measuring
@torch.no_grad()
def score(model, data, files, tokenizer, cases=100, context=1000):
    """Held-out loss (nats a token and a byte), whole needles answered, and nats above the best predictor of a random chain."""
    text = open(files[0], encoding="utf-8").read()
    tokens = np.array(tokenizer.encode(text))
    loss = np.mean([F.cross_entropy(model(torch.from_numpy(tokens[i:i + 1024])[None])[0], torch.from_numpy(tokens[i + 1:i + 1025])).item()
                    for i in range(0, len(tokens) - 1025, len(tokens) // 24)])
    rng, right, digits = data.rng, 0, 0
    for _ in range(cases):
        names, values = [data.name() for _ in range(4)], ["".join(map(str, rng.integers(0, 10, 5))) for _ in range(4)]
        plant = [np.array(tokenizer.encode(f" The secret code of {k} is {v}. ")) for k, v in zip(names, values)]
        i, asked = rng.integers(len(tokens) - context), rng.integers(4)
        room = context - sum(map(len, plant))
        body = np.split(tokens[i:i + room], np.sort(rng.integers(0, room, 4)))
        x = np.concatenate([y for pair in zip(body, plant + [np.array([], np.int64)]) for y in pair] +
                           [tokenizer.encode(f"\nQuestion: what is the secret code of {names[asked]}? Answer:")])
        answer = tokenizer.encode(" " + values[asked])
        guess = model(torch.from_numpy(np.concatenate([x, answer]))[None])[0].argmax(-1)[len(x) - 1:-1].tolist()
        right += guess == answer
        digits += sum(a == b for a, b in zip(guess[-5:], answer[-5:]))
    excess = []
    for _ in range(16):
        k, n, alpha = 8, 1024, 0.3
        state, _ = data.markov(k, n, alpha)
        p = model(torch.from_numpy(data.letters[:k][state])[None])[0].log_softmax(-1)
        counts, best = np.full((k, k), alpha), 0.0
        for t in range(n - 1):  # the posterior predictive under the true prior: no predictor does better on average
            row = counts[state[t]]
            best -= math.log(row[state[t + 1]] / row.sum()) if t >= 256 else 0.0
            row[state[t + 1]] += 1
        mine = -p[torch.arange(n - 1), torch.from_numpy(data.letters[:k][state[1:]])][256:].sum().item()
        excess.append((mine - best) / (n - 1 - 256))
    return dict(nats_per_token=round(float(loss), 4), nats_per_byte=round(float(loss) * len(tokens) / len(text.encode()), 4),
                needles_whole=right / cases, needle_digits=digits / cases / 5, chain_excess_nats=round(float(np.mean(excess)), 4))


# ---------------------------------------------------------------- training
def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--corpus", required=True)
    parse.add_argument("--out", required=True)
    parse.add_argument("--minutes", type=float, default=120, help="training time in all, resumed runs included")
    parse.add_argument("--rate", type=float, default=1.5e-3, help="highest learning rate")
    parse.add_argument("--seed", type=int, default=1)
    parse.add_argument("--score-only", action="store_true", help="measure the saved model and stop")
    args = parse.parse_args()
    files = sorted(glob.glob(f"{args.corpus}/*.txt"))
    held_out = [f for f in files if os.path.basename(f).startswith("held-out-")]
    files = [f for f in files if f not in held_out]
    os.makedirs(args.out, exist_ok=True)
    if not os.path.exists(f"{args.out}/tokenizer.model"):
        train_tokenizer(files, args.out)
    tokenizer = spm.SentencePieceProcessor(model_file=f"{args.out}/tokenizer.model")
    torch.manual_seed(args.seed)
    model = Model()
    data = Data(tokenizer, files if not args.score_only else held_out, args.seed)
    matrices = [p for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() == 1 or "embed" in n]
    optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=0.05), dict(params=others, weight_decay=0.0)], args.rate,
                                  betas=(0.9, 0.98), fused=True)
    state_file, step, spent, warm = f"{args.out}/train-state.pt", 0, 0.0, False
    if os.path.exists(state_file):
        state = torch.load(state_file, weights_only=False)
        model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
        step, spent, warm, data.known, data.rng = (state[x] for x in ("step", "spent", "warm", "known", "rng"))
    if args.score_only:
        data.rng = np.random.default_rng(args.seed + 1)
        return print(json.dumps(score(model, data, held_out, tokenizer)))
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(data.text) / 1e6:.1f} M tokens of text", flush=True)
    save = lambda: (torch.save(dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step, spent=spent, warm=warm, known=data.known,
                                    rng=data.rng), state_file + ".new"), os.replace(state_file + ".new", state_file), export(model, args.out))
    total, mean, saved = args.minutes * 60, None, spent
    while spent < total:
        start, progress = time.time(), spent / total
        if not warm:
            rows, context, needles, rate = 64, 64, 0.0, args.rate * min(1, (step + 1) / 50)
        else:
            ends = np.cumsum([share for share, *_ in STAGES])
            _, context, rows, needles = STAGES[min(int(np.searchsorted(ends, progress, "right")), len(STAGES) - 1)]
            rate = args.rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        x, y, w = data.batch(rows, context, needles, not warm)
        each = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
        loss = (each * w.flatten()).sum() / w.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), optimizer.zero_grad(set_to_none=True)
        mean = loss.item() if mean is None else 0.95 * mean + 0.05 * loss.item()
        step, spent = step + 1, spent + time.time() - start
        if not warm and mean < 0.6:
            warm, data.known = data.known == VOCAB, min(VOCAB, data.known * 2)
            print(f"step {step}: copies a repeated block (loss {mean:.2f}); "
                  + ("text begins" if warm else f"now of {data.known} tokens"), flush=True)
            mean = 1.0
        if step % 25 == 0:
            answer = each[w.flatten() == FIRST_DIGIT_WEIGHT]
            print(f"step {step}  {spent / 60:.1f} of {args.minutes:g} min  context {context}  loss {mean:.3f}"
                  + (f"  first digits {answer.mean():.3f}" if len(answer) else ""), flush=True)
        if spent - saved > 240:
            save()
            saved = spent
    save()
    data.rng = np.random.default_rng(args.seed + 1)
    print(json.dumps(score(model, data, held_out, tokenizer)))


if __name__ == "__main__":
    main()
