"""`jit_compile`: factors of sums (`alpha`, `beta`, `value`) reach the compiled code."""

import math

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import nn

import fitkit
from fitkit.extras.jit.net import JitNet
from fitkit.extras.jit.passes import EARLY, with_passes
from tests.compiling import HAS_COMPILER

pytestmark = HAS_COMPILER
torch.manual_seed(0)


def scaled_sums(a, b, w, v):
    """Each sum whose factor one of the compiler's patterns could overlook."""
    product, batches = a @ b, torch.stack([a, a]) @ torch.stack([b, b])
    narrow = (a.float() @ b.float(), w.float())
    query = a.float().view(1, 2, 4, 4)  # an attention
    scores, mask = query @ query.transpose(-2, -1) / math.sqrt(4), query.tanh()
    whole = torch.arange(16).view(4, 4)
    return [
        torch.add(product, w, alpha=0.3),
        torch.add(w, product, alpha=0.3),
        torch.add(product, v, alpha=0.3),
        torch.add(product, 2.0, alpha=0.3),
        torch.add(torch.zeros_like(w), product, alpha=0.3),
        torch.add(product, w @ w.T @ w, alpha=-0.3),
        product.clone().add_(w, alpha=0.3),
        torch.sub(product, w, alpha=0.3),
        torch.sub(w, product, alpha=0.3),
        torch.rsub(product, w, alpha=0.3),
        torch.add(product, w.float(), alpha=0.3),  # converted first
        torch.add(*narrow, alpha=0.3),
        torch.add(whole @ whole, whole, alpha=3),
        torch.add(product, whole[:, :3], alpha=0.3),
        torch.addmm(w, a, b, beta=0.3, alpha=0.7),
        torch.addmm(v, a, b, beta=0.3, alpha=0.7).add(w, alpha=2.5),
        torch.addmm(w, a, b, beta=0.0, alpha=0.7),
        torch.baddbmm(batches * 2, torch.stack([a, a]), torch.stack([b, b]), beta=0.3, alpha=0.7),
        torch.add(batches, w, alpha=0.3),
        torch.addmv(v, w.T, w[:, 0], beta=0.3, alpha=0.7),
        torch.addr(w, w[:, 0], v, beta=0.3, alpha=0.7),
        torch.addcmul(product, w, w, value=0.3),
        torch.addcmul(w, product, w, value=0.3),
        torch.addcdiv(product, w, w.abs() + 1, value=0.3),
        torch.lerp(product, w, 0.3),
        torch._foreach_add([product], [w], alpha=0.3)[0],
        F.linear(a, b.T, v).add(w, alpha=0.3),
        F.conv1d(batches, batches[:, :, :2].expand(2, 4, 2)).add(v[:2], alpha=0.3),
        torch.softmax(scores.add(mask, alpha=0.3), -1) @ query,
        torch.softmax(mask.add(scores, alpha=0.3), -1) @ query,
        torch.softmax((w * 3.0).add(w, alpha=0.4), -1),
        torch.sub(w * 2.5, (w * 2.5).amax(-1, keepdim=True), alpha=0.4),
    ]


def inputs():
    shapes = (4, 8), (8, 3), (4, 3), (3,)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@pytest.fixture
def without_kernels():
    """All of the compiler's passes; then torch's kernels instead of 40 s for some in C++."""
    is_there = hasattr(torch._inductor.config, "fallback_by_default")
    with torch._inductor.config.patch({"fallback_by_default": True} if is_there else {}):
        yield


@pytest.mark.parametrize("options", [{}, {"options": {EARLY: lambda graph: seen.append(graph)}}])
def test_no_pattern_of_the_compiler_overlooks_a_factor(options, without_kernels):
    torch._dynamo.reset()
    given = inputs()
    with torch.no_grad():
        found = torch.compile(scaled_sums, fullgraph=True, **with_passes(options))(*given)
    for place, (one, right) in enumerate(zip(found, scaled_sums(*given), strict=True)):
        tolerance = 1e-10 if right.dtype is torch.float64 else 1e-4
        assert torch.allclose(one, right, rtol=0, atol=tolerance), place
    assert bool(seen) is bool(options)  # what the user changes in the graph is changed too


seen: list[torch.fx.Graph] = []


class Scaled(nn.Module):
    """A net whose sums have factors: in forward, and so in the gradients."""

    def __init__(self):
        super().__init__()
        self.weight, self.mask = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(8, 4))

    def forward(self, x):
        return torch.add(x @ self.weight, self.mask, alpha=0.3)


@pytest.mark.parametrize("trains", [False, True])
def test_a_net_that_is_compiled_alone_keeps_its_factors(trains):
    x = torch.randn(8, 4)
    model = fitkit.Model(Scaled())
    expected = model.net(x)
    (gradient,) = torch.autograd.grad(expected.square().sum(), model.net.mask)
    JitNet(True).compile(model)
    with torch.set_grad_enabled(trains):
        found = model.net(x)
    assert torch.allclose(found, expected, atol=1e-5)
    if trains:
        (computed,) = torch.autograd.grad(found.square().sum(), model.net.mask)
        assert torch.allclose(computed, gradient, atol=1e-5)


@pytest.mark.xfail(reason="pytorch#167313; if this passes, `without_alphas` may go", strict=False)
def test_torchs_compiler_keeps_factors_by_itself():
    a, b, w, _ = inputs()
    with torch.no_grad():
        found = torch.compile(lambda: torch.add(a @ b, w, alpha=0.3))()
    assert torch.allclose(found, a @ b + 0.3 * w)
