"""Writes docs/backbones.md: which networks of timm and torchvision take attention over depth, and which don't and why.

Each is built without memory (on the meta device) and attached; with --check, only says whether the file differs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn
from torchvision.models import get_model

import lineattn.timm  # noqa: F401  # which registers EAMLP
from lineattn import attach, registry
from lineattn.cli.compare import markdown
from lineattn.errors import InputError
from lineattn.hosts.depth_host import DepthHost
from lineattn.hosts.plans import PLANS

PAGE = Path(__file__).parents[1] / "docs" / "backbones.md"

TIMM = [
    "resnet18", "resnet50", "resnet50d", "resnext50_32x4d", "wide_resnet50_2", "seresnet50", "ecaresnet50t",
    "resnetaa50", "resnet50:output_stride=16", "resnet50:output_stride=8", "skresnet18",
    "convnext_tiny", "convnextv2_tiny", "regnetx_004", "regnety_004", "regnetz_040", "regnetv_040",
    "efficientnet_b0", "mobilenetv2_100", "mobilenetv3_large_100", "mobilenetv4_conv_small",
    "vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224", "vit_small_patch14_reg4_dinov2",
    "deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224",
    "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "eamlp_14",
    "resnetv2_50", "repvgg_a0", "poolformer_s12", "inception_next_tiny",
    "dla34", "ghostnet_100", "beit_base_patch16_224", "mixer_s16_224",
]  # fmt: skip
TORCHVISION = [
    "resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "convnext_tiny", "regnet_y_400mf", "regnet_x_400mf",
    "efficientnet_b0", "mobilenet_v2", "mobilenet_v3_large", "vit_b_16", "swin_t", "swin_v2_t",
    "vgg16_bn", "alexnet", "densenet121", "mnasnet1_0", "shufflenet_v2_x1_0", "squeezenet1_1", "googlenet",
    "inception_v3",
]  # fmt: skip


def page() -> str:
    """The whole file."""
    supported, derived, refused = [], [], []
    for library, name, build in networks():
        row = {"network": name.replace(":", ", "), "library": library}
        try:
            host, plain = attached(build)
        except InputError as error:
            reason = str(error).split("; supported families:")[0].split(": ", 1)[1]
            refused.append(row | {"why": reason})
            continue
        row |= figures(host, plain)
        (derived if row["family"].startswith("traced") else supported).append(row)
    unsplit = [name for name in registry.list_methods("depth") if not needs_split(name)]
    families = ", ".join(plan.family for plan in PLANS)
    columns = ["network", "library", "family", "sites", "levels", "methods", "added by KCLA"]
    return f"""# Backbones

`lineattn.attach(net, method)` takes a network of one of these families:

{families}.

The networks below are examples; any of a family will do, in any size. Each row was built and attached by
`tools/support_table.py`, which writes this page.

- **sites**: blocks that a method stands at. A block without a shortcut (the first of an EfficientNet's stage) has none.
- **levels**: maps of `host.features(x)`, and the resolutions that they divide the input's by.
- **methods**: *all*, or *of outputs* where blocks are not split into branch and shortcut (see below).
- **added by KCLA**: its parameters, and the network's own with 1000 classes as 100%.

In a transformer all blocks are one stage and each is a level; a method sees the patches' tokens as a map, and the last
residual add of a block, that of the MLP. The tokens of class, distillation and registers pass through; where the head
reads nothing else, the last block has no site.

The methods of outputs, for blocks that aren't split: {", ".join(unsplit)}.

{markdown(supported, columns)}

## Experimental: traced

For a network of no family a plan is derived with `torch.fx`, and a warning says so. It has to be a chain of blocks from
the input to the last of them: each reads what the one before it put out. Blocks are those whose class repeats in a
`Sequential` or `ModuleList`, your own too.

{markdown(derived, columns)}

## Refused

| network | library | why |
| --- | --- | --- |
{chr(10).join(f"| {row['network']} | {row['library']} | {row['why']} |" for row in refused)}
"""


def networks() -> list[tuple[str, str, Callable[[], nn.Module]]]:
    def of_timm(name: str) -> Callable[[], nn.Module]:
        base, *extra = name.split(":")
        arguments = {key: int(value) for key, value in (pair.split("=") for pair in extra)}
        return lambda: timm.create_model(base, pretrained=False, **arguments)

    def of_torchvision(name: str) -> Callable[[], nn.Module]:
        unset = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        return lambda: get_model(name, weights=None, **unset)

    return [("timm", name, of_timm(name)) for name in TIMM] + [
        ("torchvision", name, of_torchvision(name)) for name in TORCHVISION
    ]


def attached(build: Callable[[], nn.Module]) -> tuple[DepthHost, nn.Module]:
    try:
        with torch.device("meta"):
            net = build().eval()
    except NotImplementedError:  # torchvision's RegNet computes its widths with tensors
        net = build().to("meta").eval()
    return attach(net, "kcla"), net


def figures(host: DepthHost, plain: nn.Module) -> dict[str, Any]:
    ours, theirs = (sum(p.numel() for p in module.parameters()) for module in (host.sites, plain))
    reductions = [info["reduction"] for info in host.feature_info]
    levels = ", ".join(map(str, reductions)) if len(set(reductions)) > 1 else f"{len(reductions)} at {reductions[0]}"
    splits = all(step.split for step in host.plan.steps(plain) if step.site)
    return {
        "family": host.plan.family,
        "sites": len(host.sites),
        "levels": levels,
        "methods": "all" if splits else "of outputs",
        "added by KCLA": f"{ours:,} (+{ours / theirs:.1%})",
    }


def needs_split(method: str) -> bool:
    cls = registry.get(method, axis="depth").cls
    return cls.position == "branch" or bool(cls.needs_shortcut)


def main(check: bool) -> int:
    """Writes the page, or compares."""
    warnings.simplefilter("ignore")
    text = page()
    if check and (not PAGE.exists() or PAGE.read_text() != text):
        print("docs/backbones.md: it is not what tools/support_table.py writes; run it", file=sys.stderr)
        return 1
    if not check:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
