from __future__ import annotations

import pytest
import torch

from lineattn.nn import common
from lineattn.nn.depth.base import Site
from lineattn.nn.depth.mrla import MRLALight
from tests.nn.chain import CASES, Case

KERNELS = {16: 3, 32: 3, 64: 3, 128: 5, 256: 5, 512: 5, 1024: 5, 2048: 7}  # spec section 0


def test_kernel_size():
    assert {channels: common.kernel_size(channels) for channels in KERNELS} == KERNELS
    assert all(common.kernel_size(channels) % 2 for channels in range(1, 300))


def test_softmax_over_depth():
    query, keys = torch.randn(2, 3, 4), 30 * torch.randn(2, 3, 5, 4)
    expected = torch.softmax(torch.einsum("bhd,bhld->bhl", query, keys) / 2, -1)
    assert torch.allclose(common.softmax_over_depth(query, keys), expected, rtol=1e-12)


@pytest.mark.parametrize("case", [c for c in CASES if c.takes("drop_path")], ids=lambda case: case.id)
def test_drop_path_keeps_the_mean(case: Case):
    """Over many draws a sample's attention is on average what it is without; each sample draws for itself."""
    batch, rate = 20_000, 0.3
    module = case.make(Site(2), head_dim=1, init="paper", drop_path=rate).train()
    module.norm.eval()
    with torch.no_grad():
        module.norm.bias.fill_(1.0)
    x = torch.randn(1, 2, 1, 1).expand(batch, -1, -1, -1)
    with torch.no_grad():
        dropped = (module(x, x, None)[0] - x)[:, :, 0, 0]
        whole = (module.eval()(x, x, None)[0] - x)[0, :, 0, 0]
    assert whole.abs().max() > 1e-2
    kept = dropped.abs().sum(1) > 0
    assert kept.double().mean() == pytest.approx(1 - rate, abs=5 * (rate * (1 - rate) / batch) ** 0.5)
    assert torch.allclose(dropped[kept], whole / (1 - rate), rtol=1e-12)


def test_no_drop_path_draws_nothing():
    """So that a run without it has the random numbers of the plain network."""
    before = torch.get_rng_state()
    assert common.drop_path_factor(torch.ones(4, 1), 0.0, True) is None
    assert common.drop_path_factor(torch.ones(4, 1), 0.5, False) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_light_decay():
    """Spec 1.3: drawn from N(0, 1), of any site for the shortcut, from the second of a stage on for the attention."""
    first, later = Site(4096), Site(4096, 0, 1, "continue")
    decay = MRLALight(first).decay.detach()
    assert abs(decay.mean()) < 0.1 and decay.std() == pytest.approx(1, abs=0.1)
    assert MRLALight(first, source="attention").decay is None
    assert MRLALight(later, source="attention").decay.shape == (4096,)
    assert MRLALight(first).needs_shortcut and not MRLALight(later, source="attention").needs_shortcut
