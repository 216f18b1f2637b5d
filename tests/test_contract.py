"""What every method of the depth axis owes to every family of networks; a new one of either is covered at once.

What a compiler, an exporter or a second process makes of them is in the files beside this one.
"""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from lineattn import attach, registry
from lineattn.errors import InputError
from lineattn.hosts.depth_host import DepthHost
from lineattn.hosts.weights import load_trunk
from tests.cells import (
    CELLS,
    METHODS,
    REFUSED,
    build,
    example,
    is_slow,
    methods_of,
    needs_split,
    shaken,
    without_drop_path,
)
from tests.hosts.nets import shake, small

SMALLEST = "cifar_basic"  # `make check` has each method on this family


def parameters(cells: list[tuple[str, str]]) -> list:
    return [pytest.param(cell, id="-".join(cell), marks=marks(*cell)) for cell in cells]


def marks(method: str, family: str) -> list[pytest.MarkDecorator]:
    if is_slow(method, family):
        return [pytest.mark.slow]
    return [] if family == SMALLEST else [pytest.mark.medium]


@pytest.fixture(scope="module", params=parameters(CELLS))
def cell(request: pytest.FixtureRequest) -> DepthHost:
    """A host at its start, in evaluation mode; tests that change it work on a copy."""
    return build(*request.param)


@pytest.fixture
def x(cell: DepthHost) -> Tensor:
    return example(cell)


@pytest.mark.parametrize("cell", parameters(REFUSED))
def test_what_a_family_has_not_is_refused_with_what_it_has(cell: tuple[str, str]) -> None:
    method, family = cell
    others = [name for name in METHODS if not needs_split(name)]
    with pytest.raises(InputError, match=f"can't be split .*which {method} needs; .*{others[0]}, {others[1]}"):
        attach(small(family), method)


def test_start_is_the_network_itself(cell: DepthHost, x: Tensor) -> None:
    with torch.no_grad():
        assert torch.equal(cell(x), cell.backbone(x))


def test_published_start_is_another_network(cell: DepthHost, x: Tensor) -> None:
    """The other way round: as published, every method changes what comes out at once."""
    net = shake(copy.deepcopy(cell.backbone))  # some networks start with branches of zeros
    host = attach(net, next(type(m) for m in methods_of(cell).values()), init="paper")
    if all(module.site.alone for module in methods_of(host).values()):
        return  # a mean over one layer may be that layer
    with torch.no_grad():
        assert not torch.equal(host(x), net(x))


def test_shapes(cell: DepthHost, x: Tensor) -> None:
    with torch.no_grad():
        maps = cell.features(x)
        assert cell(x).shape == (2, 5)
    assert [(m.shape[1], x.shape[2] // m.shape[2]) for m in maps] == [
        (info["num_chs"], info["reduction"]) for info in cell.feature_info
    ]
    assert all(module.site.channels in {m.shape[1] for m in maps} for module in methods_of(cell).values())


def test_odd_sizes(cell: DepthHost, x: Tensor) -> None:
    x = x[..., :-3, :-11]
    with torch.no_grad():
        try:
            cell.backbone(x)
        except (AssertionError, RuntimeError):
            pytest.skip("the network itself takes one size")
        assert shaken(cell)(x).isfinite().all()


def test_trunk_loads_strictly(cell: DepthHost, x: Tensor) -> None:
    host = copy.deepcopy(cell)
    plain = shake(copy.deepcopy(host.backbone))
    report = load_trunk(host, plain.state_dict())
    assert not report.dropped and not report.unexpected
    assert all(key.startswith("sites.") for key in report.new)
    with torch.no_grad():
        assert torch.equal(host(x), plain(x))


def test_every_parameter_gets_a_gradient(cell: DepthHost, x: Tensor) -> None:
    start = copy.deepcopy(cell).train()
    start(x).square().sum().backward()
    assert [name for name, p in start.named_parameters() if p.grad is None] == []

    host = without_drop_path(shaken(cell, torch.float64)).train()
    plain = copy.deepcopy(host.backbone)
    host(x.double()).square().sum().backward()
    plain(x.double()).square().sum().backward()
    own = {f"backbone.{name}" for name, p in plain.named_parameters() if not p.grad.abs().max() > 0}
    dead = {name for name, p in host.named_parameters() if not p.grad.abs().max() > 0}
    assert dead <= excepted(host) | own


def excepted(host: DepthHost) -> set[str]:
    """Parameters without gradient by algebra: what the card names, where a stretch starts."""
    cards = {card.cls: card for card in map(registry.get, METHODS)}
    return {
        f"sites.{key}.{name}"
        for key, module in methods_of(host).items()
        if module.site.entry == "start"
        for name, _ in (
            *cards[type(module)].no_gradient,
            *(cards[type(module)].no_gradient_alone if module.site.alone else ()),
        )
    }


def test_samples_are_independent(cell: DepthHost, x: Tensor) -> None:
    host, x = shaken(cell, torch.float64), x.double()
    other = x.clone()
    other[0] = 5 * other[0].flip(-1)
    with torch.no_grad():
        torch.testing.assert_close(host(x)[1:], host(other)[1:], rtol=0, atol=1e-12)
        torch.testing.assert_close(host(x)[1:], host(x[1:]), rtol=1e-12, atol=1e-12)


def test_copies_are_independent(cell: DepthHost, x: Tensor) -> None:
    host = shaken(cell)
    twin = copy.deepcopy(host)
    with torch.no_grad():
        before = twin(x)
        for tensor in host.state_dict().values():
            tensor.fill_(1)
        assert torch.equal(twin(x), before)


def test_nothing_holds_a_host_back(cell: DepthHost, x: Tensor) -> None:
    host = copy.deepcopy(cell)
    host(x).sum().backward()
    gone = [weakref.ref(host), weakref.ref(host.backbone), weakref.ref(next(iter(host.sites.values())))]
    gc.disable()  # what a cycle holds would stay now
    try:
        del host
        assert [ref() for ref in gone] == [None, None, None]
    finally:
        gc.enable()


def test_bf16_autocast_is_finite(cell: DepthHost, x: Tensor) -> None:
    host = shaken(cell).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = host(x).square().mean()
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in host.parameters())


def test_channels_last_stays_and_changes_nothing(cell: DepthHost, x: Tensor) -> None:
    host = shaken(cell)
    with torch.no_grad():
        plain = host(x)
        host.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
        torch.testing.assert_close(host(x), plain, rtol=1e-4, atol=1e-4)
        if all(step.maps is None for step in host.plan.steps(host.backbone)):
            assert all(m.is_contiguous(memory_format=torch.channels_last) for m in host.features(x))


def test_fused_is_equal(cell: DepthHost, x: Tensor) -> None:
    host, x = shaken(cell, torch.float64).train(), x.double()
    fused = [host.fuse(), host.fuse(trunk=False)]
    assert host.training and all(p.requires_grad for p in host.parameters())
    host.eval()
    with torch.no_grad():
        for copied in fused:
            torch.testing.assert_close(copied(x), host(x), rtol=1e-10, atol=1e-10)
    whole, folded, kept = (sum(isinstance(m, nn.BatchNorm2d) for m in net.backbone.modules()) for net in (host, *fused))
    assert kept == whole and (folded < whole or whole == 0)


def test_gain_folds_away(cell: DepthHost, x: Tensor) -> None:
    """At the same outputs, or not at all: a method that multiplies or replaces has no such form."""
    host, x = shaken(cell, torch.float64), x.double()
    for module in methods_of(host).values():
        module.gain.data.abs_()  # a negative one has no exact form behind a ReLU
    with torch.no_grad():
        before = host(x)
        try:
            host.fold_gain()
        except InputError as error:
            assert "init='identity'" in str(error)
        else:
            assert not any(name.endswith("gain") for name, _ in host.named_parameters())
        torch.testing.assert_close(host(x), before, rtol=1e-10, atol=1e-10)


def test_checkpointing_changes_nothing(cell: DepthHost, x: Tensor) -> None:
    plain, saving = shaken(cell).train(), shaken(cell).train()
    saving.set_grad_checkpointing()
    for host in (plain, saving):
        torch.manual_seed(3)  # drop path
        host(x).square().sum().backward()
    for (name, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    for (name, a), b in zip(plain.named_buffers(), saving.buffers(), strict=True):
        assert torch.equal(a, b), name
