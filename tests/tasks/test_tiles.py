"""Networks in tiles beside the same networks on the whole image, in single precision, to 1e-5."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lineattn import create_model
from lineattn.errors import InputError
from lineattn.models.segmentation import SegmentationNetwork
from lineattn.tasks import tile_frame, tiles
from lineattn.tasks.tile_frame import Frame, parts, spans
from lineattn.tasks.tile_reach import Reach, measure
from lineattn.tasks.tiles import Tiled
from tests.hosts.nets import shake
from tests.models.test_eanet import small, trunk

CLOSE = 1e-5
PLAIN = {"encoder_depth": 3, "decoder_channels": [16, 8, 8]}


def lively(net: Any) -> Any:
    """Away from its start, with maps that neither vanish nor are all the same."""
    draws = torch.Generator().manual_seed(4)
    for module in shake(net).modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, generator=draws)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
    return net.eval()


def plain(architecture: str = "unet") -> Any:
    pytest.importorskip("segmentation_models_pytorch")
    arguments = PLAIN if architecture == "unet" else {"encoder_depth": 3}
    return lively(create_model(f"smp/{architecture}:test_resnet", net_args=arguments))


def resunet(**arguments: Any) -> Any:
    return lively(create_model("resunet", width=8, **arguments))


def eanet(encoder: nn.Module | None = None, **arguments: Any) -> Any:
    """Attention with a say: large logits, whose sums over the slots differ from place to place."""
    net = lively(small(encoder, **arguments))
    net.attention.memory.keys.data.mul_(8)
    return net


def image(height: int, width: int) -> Tensor:
    """Unlike at its ends, so that what a tile sees alone differs from the whole."""
    x = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(3))
    return x * torch.linspace(0.2, 3, width) + torch.linspace(-1, 1, width)


@torch.no_grad()
def deviation(tiled: Tiled, x: Tensor) -> Tensor:
    """(H, W), the largest of the classes, over the largest output."""
    whole, found = tiled.net(x), tiled(x)
    assert found.shape == whole.shape
    return (found - whole).abs().amax((0, 1)) / whole.abs().max()


NETS = {
    "smp": (plain, (41, 301), 48),
    "linknet": (lambda: plain("linknet"), (30, 250), 40),
    "corner to corner": (resunet, (19, 451), 144),
    "attention over depth at a position": (lambda: resunet(attn="attnres", init="paper"), (19, 451), 144),
    "external": (eanet, (41, 301), 64),
    "external as published": (lambda: eanet(norm="official"), (41, 301), 64),
    "external, another stride": (lambda: eanet(trunk(16)), (41, 401), 96),
    "external in the encoder": (lambda: resunet(attn="external", at="stages.1"), (19, 451), 144),
    "slots alone": (lambda: eanet(norm="slots"), (41, 301), 64),
}
SLOWER = ("attention over depth at a position", "external in the encoder", "external as published", "slots alone")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.medium) if n in SLOWER else n for n in NETS])
def test_with_the_margin_as_overlap_tiles_are_the_whole_image(name: str) -> None:
    make, (height, width), margin = NETS[name]
    tiled = Tiled(make(), 2 * margin + 40, margin)
    assert tiled.reach == Reach(margin) and tiled.exact
    assert tiled.notice.endswith(f"the same as of the whole image (receptive-field margin {margin} pixels)")
    assert len(parts(height, width, tiled.tile, margin)) > 1
    for x in (image(height, width), image(height, width).mT.contiguous()):
        assert deviation(tiled, x).max() < CLOSE


@pytest.mark.parametrize("make", [plain, eanet], ids=["smp", "external"])
def test_with_less_overlap_they_are_so_further_than_the_margin_from_where_tiles_end(make: Any) -> None:
    tiled = Tiled(make(), 152, 16)
    x, margin = image(24, 360), tiled.reach.margin
    assert margin is not None
    found = deviation(tiled, x)
    near = torch.zeros(360, dtype=torch.bool)
    for span in spans(360, tiled.tile, 16):
        near[slice(max(span.stop - margin, 0), span.last) if span.stop < 360 else slice(0)] = True
        near[slice(span.first, span.start + margin) if span.start else slice(0)] = True
    assert found[:, ~near].max() < CLOSE < found[:, near].max() and 40 < (~near).sum() < 360
    assert f"but within {margin - 16} pixels of a seam" in tiled.notice and f"--overlap {margin} is" in tiled.notice


def test_log_normalisers_of_each_tile_alone_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    x, tiled = image(41, 301), Tiled(eanet(), 168, 64)
    shared = deviation(tiled, x).max()
    monkeypatch.setattr(Tiled, "_log_sums", lambda self, x, frame: [None] * len(frame.attended))
    assert shared < CLOSE and deviation(tiled, x).max() > 1000 * CLOSE


def test_positions_in_the_overlap_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, tiled = image(41, 301), Tiled(eanet(), 168, 64)
    monkeypatch.setattr(tile_frame, "_own", lambda span, apart, length: slice(0, length))
    assert deviation(tiled, x).max() > 100 * CLOSE


def test_interpolation_of_each_tile_from_corner_to_corner_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    x, tiled = image(19, 451), Tiled(resunet(), 328, 144)
    assert deviation(tiled, x).max() < CLOSE
    monkeypatch.setattr(tile_frame._Placed, "resize", lambda self, x, size: tile_frame._corner_to_corner(x, size))
    assert deviation(tiled, x).max() > 1000 * CLOSE


def test_tiles_with_nothing_exact_in_them_say_so() -> None:
    notice = Tiled(resunet(), 64).notice
    assert "approximate, all of a tile is nearer to its ends than the receptive-field margin" in notice
    assert "tiles of more than 288 pixels" in notice


def test_in_tiles_too_small_for_exact_normalisers_it_says_so() -> None:
    tiled = Tiled(eanet(), 128, 24)
    assert not tiled.exact and "needs its normalisers from tiles of more than 128 pixels" in tiled.notice


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: resunet(attn="kcla", init="paper"), "encoder.sites.stages_0_0 (KCLA) sees the whole image"),
        (lambda: resunet(attn="mrla_light", init="paper"), "encoder.sites.stages_0_0 (MRLALight) sees the whole image"),
        (lambda: resunet(attn="se"), "encoder.sites.stages_0_0 (SE) sees the whole image"),
        (lambda: resunet(attn="sagan", at="stages.1"), "(SAGANAttention) sees the whole image"),
        (
            lambda: resunet(net_args={"legacy_crop": True}),
            "decoder.0 (Up) depends on where in the image a tile lies",
        ),
    ],
    ids=["kcla", "mrla", "se", "sagan", "legacy_crop"],
)
def test_what_is_approximate_names_the_module(make: Any, why: str) -> None:
    tiled = Tiled(make(), 64)
    assert not tiled.exact and "approximate, " in tiled.notice and tiled.notice.endswith(why)
    assert tiled.overlap == 16 and tiled(image(20, 100)).shape == (1, 1, 20, 100)


class Rows(SegmentationNetwork):
    """Convolutions of so many pixels on one side and so many on the other, at a stride."""

    def __init__(self, *sides: tuple[int, int]) -> None:
        super().__init__()
        self.num_classes, self.stride = 1, 4
        self.layers = nn.Sequential()
        for before, behind in sides:
            conv = nn.Conv2d(1, 1, (1, before + behind + 1), bias=False)
            nn.init.zeros_(conv.weight)  # what it reads counts, whatever it makes of it
            self.layers.append(nn.Sequential(nn.ZeroPad2d((before, behind, 0, 0)), conv))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize(
    ("sides", "margin"),
    [([(0, 0)], 0), ([(3, 0)], 4), ([(0, 4)], 4), ([(5, 1), (1, 2)], 8), ([(1, 9)], 12), ([(90, 2)], 92)],
)
def test_reach_is_that_of_the_longer_side(sides: list[tuple[int, int]], margin: int) -> None:
    net = Rows(*sides)
    assert measure(net, 1) == Reach(margin)
    assert not any(module._forward_hooks for module in net.modules())


def test_what_adds_up_is_not_taken_for_one_that_sees_everything() -> None:
    assert measure(Rows(*[(30, 30)] * 5), 1) == Reach(152)
    assert measure(Rows(*[(100, 0)] * 6), 1).why == "the receptive field is larger than 1024 pixels"


@pytest.mark.parametrize("make", [resunet, eanet, plain], ids=["resunet", "eanet", "smp"])
@pytest.mark.parametrize("size", [(40, 48), (37, 51), (9, 130)])
def test_a_frame_has_the_sizes_of_the_maps_of_the_image(make: Any, size: tuple[int, int]) -> None:
    net = make()
    frame = Frame.of(net, 3, *size, net.stride)
    resized, attended = tile_frame._sizes(net, 3, *size)
    assert [one.size for pair in frame.resized for one in pair] == resized
    assert [one.size for one in frame.attended] == attended


@pytest.mark.parametrize(("length", "tile", "overlap"), [(1, 8, 0), (8, 8, 2), (9, 8, 2), (100, 24, 8), (97, 32, 0)])
def test_each_pixel_belongs_to_one_tile(length: int, tile: int, overlap: int) -> None:
    found = spans(length, tile, overlap)
    owned = [at for span in found for at in range(length)[span.kept]]
    assert owned == list(range(length))
    for span in found:
        seen = range(length)[span.seen]
        assert len(seen) <= tile and range(length)[span.kept] == seen[span.inside]
        assert span.start == 0 or span.first - span.start == overlap
        assert span.stop == length or span.stop - span.last == overlap


def test_an_image_no_larger_than_a_tile_is_seen_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tiled = Tiled(resunet(attn="kcla", init="paper"), 64)
    monkeypatch.setattr(tiles, "run", None)
    x = image(61, 64)
    with torch.no_grad():
        assert torch.equal(tiled(x), tiled.net(x))


def test_tiles_are_rounded_to_the_stride() -> None:
    tiled = Tiled(plain(), 131, 41)
    assert (tiled.tile, tiled.overlap) == (128, 48)
    assert Tiled(plain(), 8).overlap == 0 and Tiled(plain(), 1000).overlap == 48


@pytest.mark.parametrize(
    ("tile", "overlap", "message"),
    [
        (4, None, "--tile 4: must be at least 8, the network's stride, or 0"),
        (64, -1, "--overlap -1: must be 0 or more"),
        (64, 30, "--overlap 30 on both sides leaves nothing of --tile 64 (the network's stride is 8)"),
    ],
)
def test_tiles_that_make_no_sense_are_refused(tile: int, overlap: int | None, message: str) -> None:
    with pytest.raises(InputError) as error:
        Tiled(plain(), tile, overlap)
    assert str(error.value).startswith(message)


def test_the_network_is_left_as_it_was() -> None:
    net = eanet()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    tiled = Tiled(net, 168, 64)
    tiled(image(20, 250))
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    for module in net.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
