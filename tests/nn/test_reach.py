"""How far the first layer of a stage reaches: KCLA averages, MRLA-light forgets (spec section 9, point 15)."""

from __future__ import annotations

import torch

from lineattn.nn.depth.base import Site
from lineattn.nn.depth.kcla import KCLA
from lineattn.nn.depth.mrla import MRLALight

DEPTH = 16


def sites() -> list[Site]:
    return [Site(8, index=i, entry="start" if i == 0 else "continue") for i in range(DEPTH)]


def test_kcla_gives_the_first_of_t_equal_layers_one_part_in_t():
    chain = [KCLA(site, head_dim=4, drop_path=0.0, init="paper").eval() for site in sites()]
    for module in chain:  # one projection for all, so that equal maps have keys of equal length
        module.key.weight.data.copy_(chain[0].key.weight.data)
    x = torch.rand(1, 8, 3, 3)
    first = torch.zeros(1, 8, 3, 3, requires_grad=True)
    _, state = chain[0](x, None, None)
    state = state._replace(mean=state.mean + first)
    for t, module in enumerate(chain[1:], start=2):
        _, state = module(x, None, state)
        (reach,) = torch.autograd.grad(state.mean.sum(), first, retain_graph=True)
        torch.testing.assert_close(reach, torch.full_like(reach, 1 / t), rtol=1e-10, atol=0.0)


def test_mrla_light_passes_on_the_product_of_its_decays():
    chain = [MRLALight(site, head_dim=4, source="attention", drop_path=0.0, init="paper").eval() for site in sites()]
    decay = torch.linspace(0.3, 0.9, 8)
    for module in chain[1:]:
        module.decay.data.copy_(decay)
    x = torch.rand(1, 8, 3, 3)
    first = torch.zeros(1, 8, 3, 3, requires_grad=True)
    _, state = chain[0](x, None, None)
    state = state + first
    for t, module in enumerate(chain[1:], start=1):
        _, state = module(x, None, state)
        (reach,) = torch.autograd.grad(state.sum(), first, retain_graph=True)
        torch.testing.assert_close(reach, (decay**t)[None, :, None, None].expand_as(reach), rtol=1e-10, atol=0.0)
