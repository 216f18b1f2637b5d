"""Networks of segmentation_models_pytorch on any encoder of timm, ours among them; needs that library."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from lineattn.errors import InputError, unknown
from lineattn.models.segmentation import SegmentationNetwork, framed


class SmpNetwork(SegmentationNetwork):
    """A network of segmentation_models_pytorch, for images of any size.

    Args:
        architecture: Its name there in lower case: ``unet``, ``fpn``, ``deeplabv3plus``.
        encoder: Name of the encoder in timm.
        num_classes: Classes.
        in_chans: Channels of the image.
        arguments: Further arguments of the architecture, as ``encoder_output_stride``.

    Shape:
        - Input: ``(B, in_chans, H, W)``. It is filled up with zeros to a multiple of the encoder's stride.
        - Output: ``(B, num_classes, H, W)``, cut to the image.

    Raises:
        InputError: The library is not installed, or there is no such architecture or encoder.
    """

    encoder_path = "smp.encoder.model.model"

    def __init__(
        self, architecture: str, encoder: str, *, num_classes: int = 1, in_chans: int = 3, **arguments: Any
    ) -> None:
        super().__init__()
        try:
            import segmentation_models_pytorch as library
        except ImportError as error:
            raise InputError(
                "segmentation_models_pytorch is not installed: pip install 'lineattn[segmentation]'"
            ) from error
        import timm

        import lineattn.models.eamlp  # noqa: F401  # which registers its networks

        known = library.MODEL_ARCHITECTURES_MAPPING
        if architecture not in known:
            raise unknown("architecture of segmentation_models_pytorch", architecture, known)
        if not timm.is_model(encoder):
            raise unknown("encoder", encoder, timm.list_models())
        self.num_classes = num_classes
        # The getter keeps timm's network whole, so that its weights load and attention can be attached.
        given: dict[str, Any] = {"encoder_weights": None, "feature_cls": "getter", **arguments}
        self.smp: nn.Module = known[architecture](f"tu-{encoder}", in_channels=in_chans, classes=num_classes, **given)
        self.stride = cast(Any, self.smp).encoder.output_stride

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        filled = framed(x, height + -height % self.stride, width + -width % self.stride)
        return framed(self.smp(filled), height, width)
