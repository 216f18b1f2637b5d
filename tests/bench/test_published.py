"""The published form that ours is timed against computes the same, and keeps what the published code keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lineattn.bench.published import PublishedKCLA
from lineattn.nn.depth.base import Site
from lineattn.nn.depth.kcla import KCLA

CHANNELS, HEAD_DIM, DEPTH = 64, 16, 3


def pair(channels: int = CHANNELS, head_dim: int = HEAD_DIM) -> tuple[nn.ModuleList, nn.ModuleList]:
    """Two chains with the same weights, drawn; some keys are long enough to be clamped."""
    entries = ["start"] + ["continue"] * (DEPTH - 1)
    ours = nn.ModuleList(
        KCLA(Site(channels, entry=entry), head_dim=head_dim, variant="ref-cls", init="paper") for entry in entries
    )
    published = nn.ModuleList(PublishedKCLA(channels, head_dim) for _ in entries)
    for a, b in zip(ours, published, strict=True):
        for tensor in (*a.parameters(), a.norm.running_mean):
            nn.init.normal_(tensor)
        nn.init.uniform_(a.norm.running_var, 0.5, 2)
        b.load_state_dict(a.state_dict())
    return ours.double(), published.double()


def draw(channels: int = CHANNELS) -> torch.Tensor:
    """What the blocks put out; channels have means, so that keys have some length."""
    shape = (DEPTH, 4, channels, 6, 5)
    return 3 * torch.randn(shape, dtype=torch.float64) + 3 * torch.randn(*shape[:3], 1, 1, dtype=torch.float64)


def run(chain: nn.ModuleList, xs: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)  # drop path
    outs, state = [], None
    for layer, x in zip(chain, xs, strict=True):
        out, state = layer(x, None, state) if isinstance(layer, KCLA) else layer(x, state)
        outs.append(out)
    return torch.stack(outs)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("channels", "head_dim"), [(64, 16), (8, 8)], ids=["heads", "one head"])
def test_published_is_our_variant(channels: int, head_dim: int, training: bool):
    chains = pair(channels, head_dim)
    xs = draw(channels).requires_grad_()
    outs = [run(chain.train(training), xs) for chain in chains]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-10)
    cotangent = torch.randn_like(outs[0])
    grads = [torch.autograd.grad(out, (xs, *c.parameters()), cotangent) for out, c in zip(outs, chains, strict=True)]
    names = ["x", *(name for name, _ in chains[1].named_parameters())]
    assert [name for name, _ in chains[0].named_parameters()] == names[1:]
    for name, a, b in zip(names, *grads, strict=True):
        assert (a - b).abs().max() <= 1e-9 * max(1, b.abs().max()), name


def test_scores_of_the_comparison_are_clamped_in_part():
    """Else the comparison above would not see the clamp."""
    scores = pair()[0][0].weights(draw()[0], None, None)["score"]
    assert 0 < (scores == 10).double().mean() < 1
