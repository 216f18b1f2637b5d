"""The data module of segmentation: images with masks of any data set, whole or in crops, and as large as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lineattn.errors import unknown
from lineattn.tasks.data import seg_digits, seg_layouts
from lineattn.tasks.data.base import VisualData
from lineattn.tasks.data.dataset import OnError, Samples
from lineattn.tasks.data.folder import DEFAULTS
from lineattn.tasks.data.joint import Joint, joint
from lineattn.tasks.data.legend import IGNORE
from lineattn.tasks.data.masks import RuleName
from lineattn.tasks.data.pairs import PairSource, SegSplits
from lineattn.tasks.data.source import held_out
from lineattn.tasks.data.transforms import normalise, spread
from lineattn.tasks.ranges import require

Fit = Literal["crop", "resize"]
Flip = Literal["horizontal", "vertical"]
_SIDES = {"folder": 256, "isic": 256, "voc": 512, "ade20k": 512, "cityscapes": 768, "digits": 64}


class SceneData(VisualData):
    """Images and masks for segmentation.

    Args:
        name: `folder`, `isic`, `voc`, `ade20k`, `cityscapes` or `digits`, scenes of the bundled digits; by default
            `folder` where there is a root, else `digits`.
        root: Where the data set is; `digits` needs none.
        batch_size: Samples a step and process.
        num_workers: Processes that read images; by default up to 4, none where there is little to do.
        image_size: Side of the squares that are trained on; by default 256 for `folder` and `isic`, 512 for `voc` and
            `ade20k`, 768 for `cityscapes`, 64 for `digits`.
        fit: `crop`: squares are cut out of scaled images in training, and images are evaluated whole; `resize`: images
            and masks are resized to a square everywhere, as the papers' medical recipes do.
        scale: Bounds of the factor by which an image is scaled before a crop.
        flips: `horizontal`, `vertical` or both, each for half the samples.
        rotate: Half the samples are turned by an angle up to this one, in degrees and either way.
        jitter: Strength of random brightness, contrast and saturation.
        outside: Class of the pixels that turning and cutting bring in: 255 leaves them out of the loss; the code of the
            layer attention papers takes them as background, 0.
        rescale: Each image is spread from its own darkest to its own brightest value, before all else, and the network
            gets values from 0 to 255 where `mean` and `std` don't say otherwise, as in the code of the layer attention
            papers.
        channels: 1 or 3; images are converted. By default 1 for `digits`, else 3.
        mean: Mean of a channel in 0..1, to be subtracted; by default ImageNet's, 0.5 for `digits`, or 0 with `rescale`.
        std: Standard deviation of a channel; by default ImageNet's, 0.25 for `digits`, or 1/255 with `rescale`.
        classes_file: Class names, one a line, perhaps with a colour each (NAME R G B), for `folder` and `voc`.
        masks: What values of masks are, for `folder`: `index`, `binary`, `threshold` or `colour`; by default what suits
            the masks.
        val_fraction: Part of the training images held out for validation where there is no validation split; by
            default 0.2 for a folder without validation and test, else none.
        on_error: What to do at an unreadable file: `stop`, or `skip` it and say so.
    """

    resolved = ("name", "image_size", "channels", "mean", "std")

    def __init__(
        self,
        name: str | None = None,
        root: str | None = None,
        batch_size: int = 8,
        num_workers: int | None = None,
        image_size: int | None = None,
        fit: Fit = "crop",
        scale: list[float] | None = None,
        flips: list[Flip] | None = None,
        rotate: float = 0.0,
        jitter: float = 0.0,
        outside: int = IGNORE,
        rescale: bool = False,
        channels: int | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        classes_file: str | None = None,
        masks: RuleName | None = None,
        val_fraction: float | None = None,
        on_error: OnError = "stop",
        *,
        seed: int = 0,
    ) -> None:
        chosen: str = name or ("folder" if root else "digits")
        if chosen not in _SIDES:
            raise unknown("data set", chosen, _SIDES)
        super().__init__(chosen, root, batch_size, num_workers, on_error, seed)
        self.image_size = _SIDES[chosen] if image_size is None else image_size
        self.fit: Fit = fit
        self.scale = (0.5, 2.0) if scale is None else tuple(scale)
        self.flips = ["horizontal"] if flips is None else flips
        self.rotate, self.jitter, self.outside, self.rescale = rotate, jitter, outside, rescale
        self.classes_file, self.val_fraction = classes_file, val_fraction
        self.masks: RuleName | None = masks
        usual_channels, *usual = (1, [0.5], [0.25]) if chosen == "digits" else (3, DEFAULTS.mean, DEFAULTS.std)
        usual = [[0.0], [1 / 255]] if rescale else usual
        self.channels = usual_channels if channels is None else channels
        require(self.channels in (1, 3), "data.channels", self.channels, "1 or 3")
        self.mean, self.std = (
            self.per_channel(what, values or default)
            for what, values, default in zip(("mean", "std"), (mean, std), usual, strict=True)
        )
        self._check_ranges()

    def _check_ranges(self) -> None:
        require(self.image_size >= 1, "data.image_size", self.image_size, "1 or more")
        require(self.fit in get_args(Fit), "data.fit", self.fit, "crop or resize")
        require(
            len(self.scale) == 2 and 0 < self.scale[0] <= self.scale[-1], "data.scale", self.scale, "two bounds above 0"
        )
        require(0 <= self.rotate <= 180, "data.rotate", self.rotate, "from 0 to 180")
        require(0 <= self.jitter <= 1, "data.jitter", self.jitter, "from 0 to 1")
        require(0 <= self.outside <= IGNORE, "data.outside", self.outside, f"a class, or {IGNORE}")
        require(all(value > 0 for value in self.std), "data.std", self.std, "above 0")
        require(0 <= (self.val_fraction or 0) < 1, "data.val_fraction", self.val_fraction, "0 or more and below 1")
        seg_layouts.refuse_misplaced(self.name, classes_file=self.classes_file, masks=self.masks)

    @property
    def facts(self) -> dict[str, Any]:
        """The colours of the classes, where the data set has some."""
        splits = self.splits
        assert isinstance(splits, SegSplits)
        palette = splits.palette
        return {} if palette is None else {"palette": [list(colour) for colour in palette]}

    def load(self) -> SegSplits:
        if self.name == "digits":
            found = seg_digits.load(image_size=self.image_size, channels=self.channels)
        else:
            found = seg_layouts.load(
                self.name, self.root, channels=self.channels, classes_file=self.classes_file, masks=self.masks
            )
        usual = 0.2 if self.name == "folder" and found.test is None else 0.0
        return held_out(found, usual if self.val_fraction is None else self.val_fraction)

    def samples(self, source: PairSource, *, training: bool) -> Scenes:
        square = self.image_size if training or self.fit == "resize" else None
        augmented = {
            "flips": self.flips,
            "rotate": self.rotate,
            "scale": self.scale if self.fit == "crop" else None,
            "jitter": self.jitter,
            "colour": self.mean,
            "outside": self.outside,
        }
        transform = joint(size=square, **(augmented if training else {}))
        return Scenes(
            source,
            transform,
            rescale=self.rescale,
            mean=self.mean,
            std=self.std,
            seed=self.seed,
            on_error=self.on_error,
        )

    def rescaled(self, image: Tensor) -> Tensor:
        """An image that comes without a mask, as `rescale` has it before it is resized, mirrored and normalised.

        Shape:
            Input: (C, H, W), uint8. Output: the same.
        """
        return spread(image) if self.rescale else image


class Scenes(Samples):
    """Images with masks. Those of a batch are stacked where they are of one size, and else a list."""

    def __init__(
        self,
        source: PairSource,
        transform: Joint,
        *,
        rescale: bool,
        mean: Sequence[float],
        std: Sequence[float],
        seed: int,
        on_error: OnError,
    ) -> None:
        super().__init__(source, seed=seed, on_error=on_error)
        self.transform, self.rescale, self.mean, self.std = transform, rescale, mean, std

    def prepared(self, sample: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        image, mask = sample
        image, mask = self.transform(spread(image) if self.rescale else image, mask)
        return normalise(image[None], self.mean, self.std)[0], mask.long()

    def stacked(
        self, samples: list[tuple[Tensor, Tensor]], kept: list[int]
    ) -> tuple[Tensor | list[Tensor], Tensor | list[Tensor]]:
        images, masks = [image for image, _ in samples], [mask for _, mask in samples]
        if len({image.shape for image in images}) == 1:
            return torch.stack(images), torch.stack(masks)
        return images, masks
