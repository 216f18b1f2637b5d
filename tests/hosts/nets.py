"""Small networks and a method without a paper, for the tests of hosts."""

from __future__ import annotations

from collections.abc import Callable

import timm.models as timm
import torch
from torch import Tensor, nn
from torchvision.models import convnext, efficientnet, mobilenetv2, mobilenetv3, regnet, resnet, swin_transformer
from torchvision.models import vision_transformer as vit

from lineattn.models import cifar_resnet
from lineattn.nn.depth.base import DepthAttention, Init, Site


def _cifar_basic() -> nn.Module:
    return cifar_resnet.CifarResNet(cifar_resnet.BasicBlock, 14, num_classes=5, width=8)


def _cifar_bottleneck() -> nn.Module:
    return cifar_resnet.CifarResNet(cifar_resnet.Bottleneck, 20, num_classes=5, width=4)


def _torchvision_resnet(block: type, planes: int, counts: tuple[int, ...]) -> nn.Module:
    """torchvision's ResNet with narrow stages, which its constructor doesn't offer."""
    net = resnet.ResNet(block, [1, 1, 1, 1], num_classes=5, width_per_group=64)
    net.conv1, net.bn1 = nn.Conv2d(3, planes, 7, 2, 3, bias=False), nn.BatchNorm2d(planes)
    net.inplanes = planes
    for i, count in enumerate(counts):
        setattr(net, f"layer{i + 1}", net._make_layer(block, planes * 2**i, count, stride=1 if i == 0 else 2))
    net.fc = nn.Linear(net.inplanes, 5)
    return net


def _torchvision_basic() -> nn.Module:
    return _torchvision_resnet(resnet.BasicBlock, 8, (2, 1, 1, 2))


def _torchvision_bottleneck() -> nn.Module:
    return _torchvision_resnet(resnet.Bottleneck, 4, (2, 1, 1, 2))


def _timm_resnet() -> nn.Module:
    blocks = {"attn_layer": "se"}
    channels = (16, 16, 32, 32)
    return timm.resnet.ResNet(
        timm.resnet.Bottleneck, [2, 1, 2, 1], num_classes=5, channels=channels, stem_width=8, stem_type="deep",
        base_width=32, cardinality=2, avg_down=True, block_args=blocks,
    )  # fmt: skip


def _timm_convnext() -> nn.Module:
    return timm.convnext.ConvNeXt(num_classes=5, depths=(2, 1, 2, 1), dims=(16, 16, 32, 32), ls_init_value=0.5)


def _torchvision_convnext() -> nn.Module:
    stages = [(16, 32, 2), (32, 48, 2), (48, None, 1)]
    return convnext.ConvNeXt([convnext.CNBlockConfig(*stage) for stage in stages], num_classes=5, layer_scale=0.5)


def _timm_regnet() -> nn.Module:
    cfg = timm.regnet.RegNetCfg(w0=16, wa=8.0, wm=1.6, depth=6, group_size=8, stem_width=8, se_ratio=0.25)
    return timm.regnet.RegNet(cfg, num_classes=5)


def _torchvision_regnet() -> nn.Module:
    sizes = regnet.BlockParams([2, 1], [16, 32], [8, 8], [1.0, 1.0], [2, 2], se_ratio=0.25)
    return regnet.RegNet(sizes, num_classes=5, stem_width=8)


def _timm_efficientnet() -> nn.Module:
    stages = [
        ["ds_r1_k3_s1_e1_c8_se0.25"],
        ["ir_r2_k3_s2_e3_c16_se0.25"],
        ["er_r2_k3_s2_e3_c24"],
        ["ir_r3_k5_s2_e3_c32"],
    ]
    decode = timm._efficientnet_builder.decode_arch_def
    return timm.efficientnet.EfficientNet(decode(stages), num_classes=5, num_features=40, stem_size=8)


def _timm_mobilenet() -> nn.Module:
    stages = [["ds_r1_k3_s1_e1_c8"], ["ir_r2_k3_s2_e3_c16_nre"], ["ir_r3_k5_s2_e3_c24_se0.25"], ["cn_r1_k1_s1_c24"]]
    decode = timm._efficientnet_builder.decode_arch_def
    return timm.mobilenetv3.MobileNetV3(decode(stages), num_classes=5, num_features=48, stem_size=8)


def _torchvision_efficientnet() -> nn.Module:
    config = efficientnet.MBConvConfig
    stages = [config(1, 3, 1, 8, 8, 2), config(3, 3, 2, 8, 16, 2), config(3, 5, 2, 16, 24, 2)]
    return efficientnet.EfficientNet(stages, dropout=0.0, stochastic_depth_prob=0.0, num_classes=5, last_channel=40)


def _torchvision_mobilenet_v2() -> nn.Module:
    settings = [[1, 8, 2, 2], [3, 16, 2, 2], [3, 24, 2, 2]]
    return mobilenetv2.MobileNetV2(5, width_mult=1.0, inverted_residual_setting=settings, dropout=0.0)


def _torchvision_mobilenet_v3() -> nn.Module:
    rows = [(8, 3, 8, 8, True, "RE", 1), (8, 3, 24, 16, False, "RE", 2), (16, 5, 48, 16, True, "HS", 1)]
    settings = [mobilenetv3.InvertedResidualConfig(*row, 1, 1.0) for row in rows]
    return mobilenetv3.MobileNetV3(settings, last_channel=40, num_classes=5, dropout=0.0)


def _timm_vit() -> nn.Module:
    return timm.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, num_classes=5, embed_dim=32, depth=3, num_heads=2, mlp_ratio=2, reg_tokens=2,
        init_values=0.5,
    )  # fmt: skip


def _timm_deit_distilled() -> nn.Module:
    return timm.deit.VisionTransformerDistilled(
        img_size=32, patch_size=8, num_classes=5, embed_dim=32, depth=3, num_heads=2, mlp_ratio=2
    )


def _torchvision_vit() -> nn.Module:
    net = vit.VisionTransformer(32, 8, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=5)
    nn.init.normal_(net.heads.head.weight, std=0.1)  # the published start is zero
    return net


def _timm_swin() -> nn.Module:
    return timm.swin_transformer.SwinTransformer(
        img_size=32, patch_size=2, num_classes=5, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4,
        mlp_ratio=2, drop_path_rate=0.0,
    )  # fmt: skip


def _timm_swin_v2() -> nn.Module:
    return timm.swin_transformer_v2.SwinTransformerV2(
        img_size=32, patch_size=2, num_classes=5, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4,
        mlp_ratio=2, drop_path_rate=0.0,
    )  # fmt: skip


def _torchvision_swin() -> nn.Module:
    return swin_transformer.SwinTransformer(
        [2, 2], 16, [2, 2], [2, 4], [4, 4], mlp_ratio=2, stochastic_depth_prob=0.0, num_classes=5
    )


class Wide(nn.Module):
    """A residual block of nobody's library."""

    def __init__(self, before: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.project = nn.Conv2d(before, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))) + self.project(x))


class HandWritten(nn.Module):
    """A network that only tracing can make a plan for."""

    def __init__(self, num_classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16))
        self.stages = nn.ModuleList(
            [nn.Sequential(Wide(16, 16), Wide(16, 16)), nn.Sequential(Wide(16, 32, 2), Wide(32, 32))]
        )
        self.fc = nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        for stage in self.stages:
            x = stage(x)
        return self.fc(x.mean((2, 3)).view(x.size(0), -1))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "cifar_basic": _cifar_basic,
    "cifar_bottleneck": _cifar_bottleneck,
    "torchvision_basic": _torchvision_basic,
    "torchvision_bottleneck": _torchvision_bottleneck,
    "timm_resnet": _timm_resnet,
    "timm_convnext": _timm_convnext,
    "torchvision_convnext": _torchvision_convnext,
    "timm_regnet": _timm_regnet,
    "torchvision_regnet": _torchvision_regnet,
    "timm_efficientnet": _timm_efficientnet,
    "timm_mobilenet": _timm_mobilenet,
    "torchvision_efficientnet": _torchvision_efficientnet,
    "torchvision_mobilenet_v2": _torchvision_mobilenet_v2,
    "torchvision_mobilenet_v3": _torchvision_mobilenet_v3,
    "timm_vit": _timm_vit,
    "timm_deit_distilled": _timm_deit_distilled,
    "torchvision_vit": _torchvision_vit,
    "timm_swin": _timm_swin,
    "timm_swin_v2": _timm_swin_v2,
    "torchvision_swin": _torchvision_swin,
    "traced": HandWritten,
}


def small(family: str) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[family]().eval()


def image(batch: int = 2, size: int = 64, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1)).to(dtype)


def shake(net: nn.Module) -> nn.Module:
    """Takes a network away from its start: gains, and everything that a batch norm holds, at random.

    Maps stay small: gates that saturate would hide what comes before them.
    """
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if name.endswith("gain"):
                tensor.copy_(torch.randn(tensor.shape, generator=draws))
            elif name.endswith(("running_mean", "bias")):
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=draws))
            elif name.endswith("running_var"):
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=draws))
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.copy_(0.2 + 0.4 * torch.rand(module.weight.shape, generator=draws))
    return net


class Mean(DepthAttention):
    """Adds the plain mean of the stretch's outputs (of its shortcuts, with ``of="shortcut"``)."""

    carries = True

    def __init__(self, site: Site, *, of: str = "out", head_dim: int = 1, init: Init = "identity") -> None:
        super().__init__(site, init=init)
        self.needs_shortcut = of == "shortcut"
        self.head_dim = head_dim
        self.scale = nn.Parameter(torch.ones(site.channels))
        self.norm = nn.BatchNorm2d(site.channels)

    def forward(
        self, out: Tensor, shortcut: Tensor | None, state: tuple[Tensor, int] | None
    ) -> tuple[Tensor, tuple[Tensor, int]]:
        assert (state is None) == (self.site.entry == "start")
        assert (shortcut is not None) == self.needs_shortcut
        seen = out if shortcut is None else shortcut
        total, count = (0.0, 0) if state is None or self.site.entry == "transition" else state
        total, count = total + seen, count + 1
        gain = self.scale if self.gain is None else self.gain * self.scale
        return out + gain[:, None, None] * self.norm(total / count), (total, count)

    def _fold_gain(self, gain: Tensor) -> None:
        self.scale.data.mul_(gain)
