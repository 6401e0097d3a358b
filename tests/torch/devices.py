# SPDX-License-Identifier: MIT
"""Where the tests of a GPU's operators run them: on the emulator, and on a card where there is one."""

import pytest
import torch
from kvmeld_torch import Heads, _library
from kvmeld_torch import heads as heads_module

# Those with kernels (docs/how-to/cuda.md).
KERNELS = "full_cache streaming_llm h2o tova snapkv:window=8 zsmerge d2o kvmerger keepkv ems fold".split()


class Device:
    """Where heads go to run on kernels."""

    def __init__(self, where: str):
        self.where = where
        self.ops = torch.ops.kvmeld if where == "cuda" else torch.ops.kvmeld_emulated

    def tensor(self, x):
        return x.to("cuda") if self.where == "cuda" else x.clone()

    def heads(self, x: Heads) -> "There":
        return There(self, Heads(x.policy, x.spec, *[self.tensor(t) for t in x.tensors]))


class There:
    """Heads whose operators are the kernels'; results come back to the CPU."""

    def __init__(self, device: Device, heads: Heads):
        self.device, self.heads = device, heads

    def __getattr__(self, name):
        member = getattr(self.heads, name)
        if isinstance(member, torch.Tensor):
            return member.cpu()
        if not callable(member):
            return member

        def call(*args, **options):
            def there(x):
                return self.device.tensor(x) if isinstance(x, torch.Tensor) else x

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(heads_module, "ops", self.device.ops)
                out = member(*map(there, args), **{k: there(x) for k, x in options.items()})
            back = [x.cpu() if isinstance(x, torch.Tensor) else x for x in (out if isinstance(out, tuple) else (out,))]
            return tuple(back) if isinstance(out, tuple) else back[0]

        return call


def near(a, b, tolerance=2e-5):
    """Slots of two sets of heads: the same ones, their numbers within a tolerance."""
    assert torch.equal(a.length, b.length) and torch.equal(a.seen, b.seen)
    for h, n in enumerate(a.length.tolist()):
        assert torch.equal(a.position[h, :n], b.position[h, :n])
        for name in ("keys", "values", "log_mass"):
            x, y = getattr(a, name)[h, :n].float(), getattr(b, name)[h, :n].float()
            torch.testing.assert_close(x, y, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(a.columns[h, :, :n], b.columns[h, :, :n], atol=tolerance, rtol=tolerance)


def in_pages(heads: Heads, together: int, page: int = 8) -> list[torch.Tensor]:
    """What operators take of the same heads in an engine's pool, `together` of them in a sequence's pages."""
    sequences, pages = heads.heads // together, heads.capacity // page
    table = torch.randperm(sequences * pages)

    def pooled(x):  # [heads, capacity, ...] -> [pages, together, page, ...]
        x = x.view(sequences, together, pages, page, *x.shape[2:]).transpose(1, 2).flatten(0, 1)
        return torch.empty_like(x).index_copy_(0, table.to(x.device), x)

    keys, values = torch.stack([pooled(heads.keys), pooled(heads.values)]).transpose(2, 3).contiguous()
    table = table.int().view(sequences, pages).to(keys.device)
    return [keys, values, *(x.clone() for x in heads.tensors[2:8]), table]


@pytest.fixture(params=["emulated", "cuda"])
def device(request):
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
    else:
        built = _library.path().with_name("libkvmeld_torch_emulated.so")
        if not built.exists():
            pytest.skip(f"{built.name} is built by tests/run")
        torch.ops.load_library(str(built))
    return Device(request.param)
