"""What holds for every network for segmentation, whatever it is made of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.export import Dim, export

from lineattn.hosts.depth_host import DepthHost
from tests.hosts.nets import shake
from tests.models.seg_nets import NAMES, narrow, small

pytestmark = pytest.mark.parametrize("name", NAMES)

METHODS = [None, "kcla"]


@pytest.fixture(autouse=True)
def few_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow(monkeypatch)


def images(batch: int = 2, size: tuple[int, int] = (33, 49), dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(1), dtype=dtype)


def test_output_is_as_large_as_the_image(name: str) -> None:
    """Case 13: sizes that no stride divides, down to a pixel; in training too, where batch norms have enough of it."""
    net = small(name)
    with torch.no_grad():
        for size in ((65, 97), (100, 35), (64, 64), (9, 2), (1, 1)):
            assert net.eval()(images(size=size)).shape == (2, 3, *size)
            if min(size) > 32:
                assert net.train()(images(size=size)).shape == (2, 3, *size)


@pytest.mark.parametrize("channels", [1, 4])
def test_images_of_other_channels(name: str, channels: int) -> None:
    with torch.no_grad():
        assert small(name, in_chans=channels).eval()(torch.randn(1, channels, 33, 49)).shape == (1, 3, 33, 49)


@pytest.mark.parametrize("method", METHODS)
def test_every_parameter_gets_a_gradient(name: str, method: str | None) -> None:
    options = {"init": "paper", "drop_path": 0.0} if method else {}
    net = shake(small(name, attn=method, **options)).double().train()
    net(images(size=(65, 97), dtype=torch.float64)).square().mean().backward()
    assert [key for key, parameter in net.named_parameters() if parameter.grad is None] == []
    dead = {key for key, p in net.named_parameters() if p.grad is not None and not (p.grad.abs() > 1e-15).any()}
    # The softmax over the positions cancels the query's bias, the norms what convolutions before them add.
    assert {key for key in dead if not key.endswith(".bias")} == set()


@pytest.mark.parametrize("method", ["kcla", "mrla_light"])
def test_attention_in_the_encoder_changes_nothing_at_the_start(name: str, method: str) -> None:
    plain = shake(small(name)).eval()
    net = small(name, attn=method, trunk=plain.state_dict()).eval()
    encoder, x = net.get_encoder(), images()
    assert isinstance(encoder, DepthHost) and len(encoder.sites) >= 4
    with torch.no_grad():
        assert torch.equal(net(x), plain(x))
        shake(encoder.sites)
        assert not torch.equal(net(x), plain(x))


@pytest.mark.parametrize("method", METHODS)
def test_no_image_sees_another(name: str, method: str | None) -> None:
    net, x = shake(small(name, attn=method)).double().eval(), images(3, dtype=torch.float64)
    with torch.no_grad():
        assert (net(x)[1:] - net(x[1:])).abs().max() < 1e-12


def test_copies_are_independent_and_weights_make_the_same_network(name: str) -> None:
    net, x = shake(small(name, attn="kcla")).eval(), images()
    twin, other = copy.deepcopy(net), small(name, attn="kcla").eval()
    other.load_state_dict(net.state_dict())
    with torch.no_grad():
        found = net(x)
        assert torch.equal(twin(x), found) and torch.equal(other(x), found)
        for parameter in twin.parameters():
            parameter.zero_()
        assert torch.equal(net(x), found) and not torch.equal(twin(x), found)


@pytest.mark.medium
def test_an_exported_graph_is_for_all_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow(monkeypatch, layers=(1, 1, 1, 3))  # a second for each few blocks
    net = shake(small(name, attn="kcla")).double().eval()
    sides = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    graph = export(net, (images(2, (41, 58), torch.float64),), dynamic_shapes=(sides,)).module()
    for size in ((41, 58), (33, 49), (70, 35)):
        x = images(3, size, torch.float64)
        with torch.no_grad():
            assert (graph(x) - net(x)).abs().max() < 1e-10
