r"""Faster R-CNN, Mask R-CNN and RetinaNet: torchvision's parts, over the maps of any network that has a plan.

The trunk is a `lineattn.hosts.depth_host.DepthHost`, with attention or without, so that the state of attention over
depth goes through all of it. The names of all else are torchvision's, and published weights of its detectors load.

References:
    - "Faster R-CNN: Towards Real-Time Object Detection with Region Proposal Networks" (2015), arXiv 1506.01497
    - "Feature Pyramid Networks for Object Detection" (2017), arXiv 1612.03144
    - "Mask R-CNN" (2017), arXiv 1703.06870
    - "Focal Loss for Dense Object Detection" (2017), arXiv 1708.02002, RetinaNet
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torchvision.models import detection as tv
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelMaxPool, LastLevelP6P7

from lineattn.errors import InputError, unknown
from lineattn.hosts.attach import as_host
from lineattn.hosts.sources import Weights
from lineattn.models.encoder import EncoderNetwork

_RATIOS = (0.5, 1.0, 2.0)
# Of torchvision's arguments, those that are made here, or come otherwise.
_REFUSED = {
    *("self", "backbone", "num_classes", "kwargs", "image_mean", "image_std", "rpn_anchor_generator", "rpn_head"),
    *("box_roi_pool", "box_head", "box_predictor", "mask_roi_pool", "mask_head", "mask_predictor"),
    *("anchor_generator", "head", "proposal_matcher"),
}
# torchvision trained these with batch norms that add nothing to the variance.
_NO_EPS = {
    "fasterrcnn_resnet50_fpn": tv.FasterRCNN_ResNet50_FPN_Weights.COCO_V1,
    "maskrcnn_resnet50_fpn": tv.MaskRCNN_ResNet50_FPN_Weights.COCO_V1,
    "retinanet_resnet50_fpn": tv.RetinaNet_ResNet50_FPN_Weights.COCO_V1,
}
_EPS = 1e-5


class Pyramid(nn.Module):
    """The last maps of a trunk, and a feature pyramid over them.

    Args:
        trunk: A network that has a plan, or a host; what comes behind its last map is taken out.
        levels: How many of its maps.
        channels: Channels of the pyramid.
        extra: Makes the coarser levels from those.

    Shape:
        - Input: ``(B, in_chans, H, W)``.
        - Output: a dictionary of maps ``(B, channels, H / s, W / s)``, finest first.

    Attributes:
        strides: Pixels between two positions of the trunk's maps.

    Raises:
        InputError: The maps of the trunk are not each coarser than the one before.
    """

    def __init__(self, trunk: nn.Module, *, levels: int, channels: int, extra: ExtraFPNBlock) -> None:
        super().__init__()
        host = as_host(trunk)
        first = max(0, len(host.feature_info) - levels)
        self.levels = list(range(first, len(host.feature_info)))
        self.strides = [info["reduction"] for info in host.feature_info[first:]]
        if len(self.strides) < 2 or any(b <= a for a, b in zip(self.strides, self.strides[1:], strict=False)):
            raise InputError(
                f"the maps of a {host.plan.family} are {self.strides} pixels a position: a feature pyramid needs each "
                "coarser than the one before; take a network with stages"
            )
        host.prune_intermediate_layers(self.levels)
        self.body: nn.Module = host
        self.fpn = FeaturePyramidNetwork([host.feature_info[i]["num_chs"] for i in self.levels], channels, extra)
        self.out_channels = channels  # torchvision's detectors ask for it

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        body: Any = self.body
        maps = body.forward_intermediates(x, indices=self.levels, intermediates_only=True)
        return self.fpn(OrderedDict((str(i), level) for i, level in enumerate(maps)))


class Detector(EncoderNetwork):
    """What the detectors have beside torchvision's class.

    Shape:
        - Input: a list of images ``(in_chans, H, W)`` of any sizes, from 0 to 1; in training, a list of targets too.
        - Output: of each image a dictionary: ``boxes`` ``(n, 4)``, x1 y1 x2 y2 in pixels of the image, ``labels`` from
          1 on, ``scores``, and of a Mask R-CNN ``masks`` ``(n, 1, H, W)``. In training, a dictionary of losses.
    """

    encoder_path = "backbone.body"
    losses: tuple[str, ...]
    """Names of the losses, in the order of their computation."""

    @abstractmethod
    def forward_dense(self, x: Tensor) -> list[Any]:
        """Everything of an image ``(1, in_chans, H, W)`` but the choice of regions, for counting its cost.

        Heads of regions see as many as the network may propose, and those of masks as many as it may detect.
        """

    def converted(self, found: Weights) -> tuple[Weights, tuple[tuple[str, str], ...]]:
        """Of three networks that torchvision has published, running variances less the eps that they were not trained
        with: so the outputs are theirs, and a checkpoint keeps them so."""
        name = Path(found.name).name
        if not any(name in (arch, str(weights), Path(weights.url).name) for arch, weights in _NO_EPS.items()):
            return found, ()
        tensors = {key: value - _EPS if key.endswith(".running_var") else value for key, value in found.tensors.items()}
        change = (self.encoder_path, f"running variances less {_EPS}, as published with batch norms without eps")
        return replace(found, tensors=tensors), (change,)


class _TwoStage(Detector):
    losses: tuple[str, ...] = ("loss_objectness", "loss_rpn_box_reg", "loss_classifier", "loss_box_reg")
    backbone: Any
    rpn: Any
    roi_heads: Any

    def forward_dense(self, x: Tensor) -> list[Any]:
        maps = list(self.backbone(x).values())
        boxes = self.roi_heads.box_head(self._regions(x, self.roi_heads.box_roi_pool, self.rpn.post_nms_top_n()))
        return [self.rpn.head(maps), self.roi_heads.box_predictor(boxes)]

    def _regions(self, x: Tensor, pool: MultiScaleRoIAlign, count: int) -> Tensor:
        return x.new_zeros(count, self.backbone.out_channels, *pool.output_size)


class FasterRCNN(_TwoStage, tv.FasterRCNN):
    """Faster R-CNN on a feature pyramid, see `build`."""

    def __init__(self, trunk: nn.Module, num_classes: int, **arguments: Any) -> None:
        super().__init__(**_two_stage(trunk, num_classes, **arguments))


class MaskRCNN(_TwoStage, tv.MaskRCNN):
    """Mask R-CNN on a feature pyramid, see `build`."""

    losses = (*_TwoStage.losses, "loss_mask")

    def __init__(self, trunk: nn.Module, num_classes: int, **arguments: Any) -> None:
        parts = _two_stage(trunk, num_classes, **arguments)
        channels = parts["backbone"].out_channels
        super().__init__(
            **parts,
            mask_roi_pool=MultiScaleRoIAlign(parts["box_roi_pool"].featmap_names, 14, 2),
            mask_head=MaskRCNNHeads(channels, [channels] * 4, 1),
            mask_predictor=MaskRCNNPredictor(channels, channels, num_classes + 1),
        )

    def forward_dense(self, x: Tensor) -> list[Any]:
        heads = self.roi_heads
        regions = self._regions(x, heads.mask_roi_pool, heads.detections_per_img)
        return [*super().forward_dense(x), heads.mask_predictor(heads.mask_head(regions))]


class RetinaNet(Detector, tv.RetinaNet):
    """RetinaNet, see `build`."""

    losses = ("classification", "bbox_regression")

    def __init__(
        self,
        trunk: nn.Module,
        num_classes: int,
        *,
        fpn_channels: int = 256,
        anchor_scale: float = 4,
        **torchvision: Any,
    ) -> None:
        extra = LastLevelP6P7(fpn_channels, fpn_channels)
        pyramid = Pyramid(trunk, levels=3, channels=fpn_channels, extra=extra)
        last = pyramid.strides[-1]
        sizes = [anchor_scale * stride for stride in (*pyramid.strides, 2 * last, 4 * last)]
        octaves = tuple((size, int(size * 2 ** (1 / 3)), int(size * 2 ** (2 / 3))) for size in sizes)
        anchors = AnchorGenerator(octaves, (_RATIOS,) * len(sizes))
        super().__init__(pyramid, num_classes + 1, anchor_generator=anchors, **torchvision)

    def forward_dense(self, x: Tensor) -> list[Any]:
        net: Any = self
        return [net.head(list(net.backbone(x).values()))]


def _two_stage(
    trunk: nn.Module,
    num_classes: int,
    *,
    fpn_channels: int = 256,
    box_width: int = 1024,
    anchor_scale: float = 8,
    **torchvision: Any,
) -> dict[str, Any]:
    """What torchvision's two-stage detectors are put together from."""
    pyramid = Pyramid(trunk, levels=4, channels=fpn_channels, extra=LastLevelMaxPool())
    sizes = [(anchor_scale * stride,) for stride in (*pyramid.strides, 2 * pyramid.strides[-1])]
    return {
        "backbone": pyramid,
        "rpn_anchor_generator": AnchorGenerator(tuple(sizes), (_RATIOS,) * len(sizes)),
        "box_roi_pool": MultiScaleRoIAlign([str(i) for i in range(len(pyramid.levels))], 7, 2),
        "box_head": TwoMLPHead(fpn_channels * 7**2, box_width),
        "box_predictor": FastRCNNPredictor(box_width, num_classes + 1),
        **torchvision,
    }


_KINDS: dict[str, type[Any]] = {"faster_rcnn": FasterRCNN, "mask_rcnn": MaskRCNN, "retinanet": RetinaNet}


def build(
    kind: str,
    trunk: nn.Module,
    *,
    num_classes: int = 90,
    mean: Sequence[float] = (0.485, 0.456, 0.406),
    std: Sequence[float] = (0.229, 0.224, 0.225),
    **net_args: Any,
) -> Detector:
    """A detector on a trunk.

    Args:
        kind: ``faster_rcnn``, ``mask_rcnn`` or ``retinanet``.
        trunk: A network that has a plan, or a host of one.
        num_classes: Classes, without the background.
        mean: Mean of a channel in 0..1, to be subtracted.
        std: Standard deviation of a channel.
        net_args: ``min_size`` and ``max_size`` of an image, and torchvision's thresholds and counts, such as
            ``box_detections_per_img``; beside them ``fpn_channels`` (256), ``box_width`` of the two layers of the box
            head (1024; not of RetinaNet), and ``anchor_scale``, the side of an anchor in positions of its map (8, and
            4 for the smallest of RetinaNet's three).

    Raises:
        InputError: An argument isn't known, or the trunk has no pyramid.

    Example:
        >>> import lineattn, torch
        >>> trunk = lineattn.create_model("resnet20_cifar", attn="kcla")
        >>> net = build("mask_rcnn", trunk, num_classes=3, min_size=64, fpn_channels=16, box_width=32).eval()
        >>> sorted(net([torch.rand(3, 48, 64)])[0])
        ['boxes', 'labels', 'masks', 'scores']
    """
    cls = _KINDS[kind]
    theirs = next(base for base in cls.__mro__ if base.__module__.startswith("torchvision."))
    own = inspect.signature(cls if kind == "retinanet" else _two_stage).parameters.keys()
    known = (own | inspect.signature(theirs).parameters.keys()) - _REFUSED - {"trunk", "torchvision"}
    for key in net_args:
        if key not in known:
            raise unknown(f"argument of {kind}", key, known)
    return cls(trunk, num_classes, image_mean=list(mean), image_std=list(std), **net_args)
