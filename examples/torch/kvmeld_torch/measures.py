# SPDX-License-Identifier: MIT
"""What `kvmeld_torch.compare` measures of a method: a cache that holds a prompt, however it was compressed."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from transformers import Cache as TransformersCache
from transformers import DynamicCache, PreTrainedModel

from . import ranks
from .cache import Cache
from .second_reading import replay

BEHIND = 64  # tokens after a prompt that are read with the compressed cache


@dataclass
class Method:
    """A policy of kvmeld, a press of kvpress, or neither: the full cache."""

    name: str
    budget: float
    attention: str
    cache: Callable[[], TransformersCache]
    reading: Callable[[PreTrainedModel], AbstractContextManager] = lambda _: nullcontext()  # around a prompt
    is_press: bool = False

    def prefill(self, model: PreTrainedModel, prompt: Tensor) -> tuple[TransformersCache, Tensor, float]:
        """The compressed cache, the next token's logits, and the seconds that it took."""
        model.set_attn_implementation(self.attention)
        cache = self.cache()
        begin = time.perf_counter()
        with self.reading(model):
            logits = model(prompt, past_key_values=cache, logits_to_keep=1).logits
        return cache, logits[:, -1], time.perf_counter() - begin

    def read(self, model: PreTrainedModel, cache: TransformersCache, tokens: Tensor, position: int) -> Tensor:
        """Logits of tokens at positions `position` and on: a press's cache does not know them."""
        at = torch.arange(position, position + tokens.shape[1])[None]
        return model(tokens, past_key_values=cache, position_ids=at).logits

    def answer(
        self, model: PreTrainedModel, cache: TransformersCache, question: Tensor, position: int, n: int
    ) -> list[int]:
        """The next `n` greedy tokens, the question read token by token as a prompt that has ended is."""
        answer: list[int] = []
        tokens = question.split(1, 1)
        for i in range(question.shape[1] + n - 1):
            x = tokens[i] if i < question.shape[1] else torch.tensor([[answer[-1]]])
            logits = self.read(model, cache, x, position + i)
            if i >= question.shape[1] - 1:
                answer.append(int(logits[0, -1].argmax()))
        return answer


def policy(text: str, budget: float, encode: Callable[[str], list[int]]) -> Method:
    return Method(text, budget, "kvmeld", lambda: Cache(text, budget), lambda model: replay(model, encode))


def press(name: str, budget: float) -> Method:
    import kvpress

    if not hasattr(kvpress, name):
        raise SystemExit(f"--presses: expected one of kvpress's (SnapKVPress, ...), got {name}")
    return Method(
        name,
        budget,
        "sdpa",
        DynamicCache,
        lambda model: getattr(kvpress, name)(compression_ratio=1 - budget)(model),
        is_press=True,
    )


FULL = Method("full cache", 1.0, "sdpa", DynamicCache)


def held(cache: TransformersCache) -> tuple[int, int]:
    """Bytes of slots and of a policy's state, on this rank."""
    if isinstance(cache, Cache):
        state = cache.state_nbytes()
        return cache.nbytes() - state, state
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers), 0


class Recorder:
    """Outputs of all attention layers, before their last projection, while it is open."""

    def __init__(self, model: PreTrainedModel):
        self.outputs: list[Tensor] = []
        self._layers = [layer.self_attn.o_proj for layer in model.model.layers]

    def __enter__(self) -> "Recorder":
        self._hooks = [
            layer.register_forward_pre_hook(lambda _, x: self.outputs.append(x[0].detach())) for layer in self._layers
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


@dataclass
class Reading:
    """Of a prompt and the tokens behind it."""

    outputs: list[Tensor]  # of each layer's attention
    nll: float
    bytes: int  # of all ranks
    rank_bytes: list[int]  # of slots and of state, the most that a rank has
    seconds: float  # of the prompt
    step: float  # milliseconds a decoded token


def reading(method: Method, model: PreTrainedModel, tokens: Tensor) -> Reading:
    """tokens [prompt + BEHIND + 1]: the prompt compressed, the others read with what is left."""
    prompt = tokens[None, : -BEHIND - 1]
    method.prefill(model, prompt)  # nothing is loaded for the first time
    cache, _, seconds = method.prefill(model, prompt)
    size, n = torch.tensor(held(cache)), prompt.shape[1]
    taken, logits = [], []
    with Recorder(model) as record:
        for i in range(BEHIND):
            begin = time.perf_counter()
            logits.append(method.read(model, cache, tokens[None, n + i : n + i + 1], n + i))
            taken.append(1e3 * (time.perf_counter() - begin))
    layers = len(model.model.layers)
    outputs = [torch.cat(record.outputs[i::layers], 1) for i in range(layers)]
    nll = torch.nn.functional.cross_entropy(torch.cat(logits, 1)[0], tokens[n + 1 :])
    most = ranks.total(size.clone(), ReduceOp.MAX).tolist()
    return Reading(outputs, float(nll), int(ranks.total(size).sum()), most, seconds, sorted(taken)[BEHIND // 10])


def error(mine: Reading, full: Reading) -> float:
    """Of the attention's outputs, as a share of their norm, the mean of all layers."""
    squares = [[float(x.double().square().sum()) for x in (a - b, b)] for a, b in zip(mine.outputs, full.outputs)]
    of_layers = ranks.total(torch.tensor(squares, dtype=torch.float64))  # each rank has some of the heads
    return float((of_layers[:, 0] / of_layers[:, 1]).sqrt().mean())
