r"""EAMLP: image classification by external attention alone, in the shell of a T2T-ViT.

"Beyond Self-attention: External Attention using Two Linear Layers for Visual Tasks" (Guo, Liu, Mu, Hu; 2021), arXiv
2105.02358, section 4.6; the shell is of "Tokens-to-Token ViT" (Yuan et al.; 2021), arXiv 2101.11986.

Overlapping patches become tokens in three splits, of strides 4, 2 and 2, with external attention between them; a class
token and a table of positions come to them, then blocks

.. math::
    x \leftarrow x + \mathrm{MEA}(\mathrm{LN}(x)), \qquad x \leftarrow x + \mathrm{MLP}(\mathrm{LN}(x))

and a classifier of the class token. Cost O(N), N pixels; no state. Importing this module registers the networks in
timm, as `lineattn.timm` does.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import Attention, DropPath, Mlp, trunc_normal_  # pyright: ignore[reportPrivateImportUsage]
from timm.models import build_model_with_cfg, register_model, resolve_pretrained_cfg
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.hosts.checkpointing import checkpointed
from lineattn.nn.sample.external import ExternalMemory, MemoryNorm
from lineattn.nn.sample.external_multihead import MultiHeadExternalAttention

BlockAttention = Literal["external_multihead", "self_attention"]
MlpNorm = Literal["ln", "bn"]
STRIDE = 16  # of the three splits
_WIDTH, _SLOTS = 64, 128  # of the stem, the same in all networks


class TokenAttention(nn.Module):
    r"""External attention from tokens of one width to tokens of another, and an MLP: what stands between two splits.

    .. math::
        q = W\,\mathrm{LN}(x) + b, \qquad z = q + W_o\,(\mathrm{norm}(q M_k^\top) M_v + b_v) + b_o, \qquad
        y = z + \mathrm{MLP}(\mathrm{LN}(z))

    Args:
        inputs: Width of a token.
        width: Width of a token of the result, of the memories and of the MLP.
        slots: Slots of the memories.
        norm: See `lineattn.nn.sample.external.ExternalMemory`.
        dropout: Probability of dropping an attention weight, and an output of the attention, in training.

    Shape:
        - Input: ``(B, N, inputs)``.
        - Output: ``(B, N, width)``.
    """

    def __init__(self, inputs: int, width: int, slots: int, *, norm: MemoryNorm, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(inputs)
        self.query = nn.Linear(inputs, width)
        self.memory = ExternalMemory(width, slots, norm=norm, std=0.02, dropout=dropout)
        self.value_bias = nn.Parameter(torch.zeros(width))
        self.project = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(self.norm1(x))
        x = query + self.drop(self.project(self.memory(query) + self.value_bias))
        return x + self.mlp(self.norm2(x))


class Stem(nn.Module):
    """Tokens of an image: windows of 7x7 pixels, then twice of 3x3 tokens, that overlap.

    Args:
        in_chans: Channels of the image.
        embed_dim: Width of a token.
        norm: See `lineattn.nn.sample.external.ExternalMemory`.
        dropout: See `TokenAttention`.

    Shape:
        - Input: ``(B, in_chans, H, W)``, both sides multiples of 16.
        - Output: ``(B, H * W / 256, embed_dim)``, row by row.
    """

    def __init__(self, in_chans: int, embed_dim: int, *, norm: MemoryNorm, dropout: float) -> None:
        super().__init__()
        self.attention1 = TokenAttention(7 * 7 * in_chans, _WIDTH, _SLOTS, norm=norm, dropout=dropout)
        self.attention2 = TokenAttention(3 * 3 * _WIDTH, _WIDTH, _SLOTS, norm=norm, dropout=dropout)
        self.project = nn.Linear(3 * 3 * _WIDTH, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2] // 4, x.shape[3] // 4
        x = self.attention1(F.unfold(x, 7, stride=4, padding=2).mT)
        x = self.attention2(_windows(x, height, width))
        return self.project(_windows(x, height // 2, width // 2))


def _windows(x: Tensor, height: int, width: int) -> Tensor:
    """``(B, H * W, C) -> (B, H * W / 4, 9 * C)``: 3x3 tokens of a map at every other one, channel by channel."""
    return F.unfold(x.mT.unflatten(2, (height, width)), 3, stride=2, padding=1).mT


class Block(nn.Module):
    """Attention and an MLP, with norms before them and drop path behind them.

    Args:
        width: Width of a token.
        attention: From tokens to tokens of that width.
        hidden: Width inside the MLP.
        norm_mlp: Norm before the MLP: a layer norm, or a batch norm over samples and positions.
        dropout: In the MLP.
        drop_path: Probability of leaving a branch out in training, a sample.
    """

    def __init__(
        self, width: int, attention: nn.Module, hidden: int, *, norm_mlp: MlpNorm, dropout: float, drop_path: float
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = attention
        self.norm2 = nn.LayerNorm(width) if norm_mlp == "ln" else nn.BatchNorm1d(width)
        self.mlp = Mlp(width, hidden, drop=dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.mlp_branch(x)

    def mlp_branch(self, x: Tensor) -> Tensor:
        """What the MLP adds to the tokens behind the attention."""
        # In rows, where a synchronised norm that somebody put in the batch norm's place finds its channels too.
        normed = self.norm2(x) if isinstance(self.norm2, nn.LayerNorm) else self.norm2(x.flatten(0, 1)).view_as(x)
        return self.drop_path(self.mlp(normed))


class EAMLP(nn.Module):
    r"""EAMLP, by default EAMLP-14; timm makes all of them by name: ``eamlp_7``, ``eamlp_14``, ``eamlp_19``.

    Per block, with `lineattn.nn.sample.external_multihead.MultiHeadExternalAttention` for width :math:`C` and an MLP of
    ratio :math:`r`: :math:`8 C^2 + 2 r C^2` and lower terms of parameters, :math:`8 C^2 + 512 C + 2 r C^2` MACs a
    token, whatever the number of tokens. At 224 pixels, in millions of trained parameters and billions of MACs: 6.10
    and 1.465 (EAMLP-7), 29.80 and 6.450 (14), 54.47 and 11.598 (19). Self-attention is the cheaper one up to
    :math:`2 C + 256` tokens, and 224 pixels make 197.

    Args:
        embed_dim: Width ``C`` of a token.
        depth: Blocks.
        heads: Heads of a self-attention of this width; external attention has four times as many.
        mlp_ratio: Width inside the MLP of a block, in widths of a token.
        num_classes: Outputs of the classifier; 0 for none.
        in_chans: Channels of the image.
        img_size: Side of the image, or ``(H, W)``; multiples of 16.
        attn: Attention of the blocks: ``external_multihead``, or ``self_attention`` to compare with, as T2T-ViT has it:
            without biases of queries, keys and values. The stem keeps external attention.
        norm: Of all memories: ``log`` (exact), ``official`` (as published) or ``slots`` (no exchange between
            positions), see `lineattn.nn.sample.external.ExternalMemory`.
        norm_mlp: Norm before the MLPs of the blocks: ``ln``, as published, or ``bn``, a batch norm over all tokens of
            all samples. The paper names an EAMLP-BN without defining it; ``bn`` is our reading.
        drop_rate: Dropout behind the table of positions, behind the attention of the blocks and in their MLPs.
        drop_path_rate: Drop path of the last block; it grows linearly from zero at the first.
        stem_drop: Dropout of the stem's attention.

    Shape:
        - Input: ``(B, in_chans, H, W)``.
        - Output: ``(B, num_classes)``, or ``(B, embed_dim)`` without a classifier.

    Raises:
        InputError: An argument out of its range; from `forward`, an image of another size than the network's.

    Note:
        The published code has two files for the stem, with equal parameters; the one its networks use drops a tenth in
        training (``stem_drop=0.1``), the other nothing. In the stem both start with values that equal the keys; on the
        CPU they share storage there, and a checkpoint that is loaded writes the one over the other. Ours never do. The
        table of positions, a parameter without gradient there, is a buffer here, and follows from ``img_size``: it is
        not among the weights, and weights of one size fit another. In the blocks the biases of the first norm, of the
        queries and of the keys are there for these checkpoints alone: all positions get the same, which the softmax
        over them cancels.

    Example:
        >>> net = EAMLP(embed_dim=32, depth=2, heads=2, num_classes=5, img_size=32)
        >>> net(torch.randn(2, 3, 32, 32)).shape, net.forward_features(torch.randn(2, 3, 32, 32)).shape
        (torch.Size([2, 5]), torch.Size([2, 5, 32]))

    Reference:
        "Beyond Self-attention: External Attention using Two Linear Layers for Visual Tasks" (2021), arXiv 2105.02358,
        section 4.6.
    """

    pos_embed: Tensor

    def __init__(
        self,
        *,
        embed_dim: int = 384,
        depth: int = 14,
        heads: int = 6,
        mlp_ratio: float = 3.0,
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int | tuple[int, int] = 224,
        attn: BlockAttention = "external_multihead",
        norm: MemoryNorm = "log",
        norm_mlp: MlpNorm = "ln",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        stem_drop: float = 0.1,
    ) -> None:
        super().__init__()
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
        if min(height, width) < 1 or height % STRIDE or width % STRIDE:
            raise InputError(f"img_size is {img_size}; both sides must be multiples of {STRIDE}")
        if depth < 1:
            raise InputError(f"depth is {depth}; it must be at least 1")
        if heads < 1 or embed_dim % heads:
            raise InputError(f"heads is {heads}; it must divide embed_dim, which is {embed_dim}")
        if attn not in get_args(BlockAttention):
            raise InputError(f"attn is {attn!r}; it must be 'external_multihead' or 'self_attention'")
        if norm_mlp not in get_args(MlpNorm):
            raise InputError(f"norm_mlp is {norm_mlp!r}; it must be 'ln' or 'bn'")
        self.num_classes, self.in_chans, self.img_size = num_classes, in_chans, (height, width)
        self.grid = (height // STRIDE, width // STRIDE)
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.grad_checkpointing = False

        self.stem = Stem(in_chans, embed_dim, norm=norm, dropout=stem_drop)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim))
        table = sinusoid_table(1 + self.grid[0] * self.grid[1], embed_dim)
        self.register_buffer("pos_embed", table[None], persistent=False)
        self.register_load_state_dict_post_hook(_restore_table)
        self.pos_drop = nn.Dropout(drop_rate)

        def attention() -> nn.Module:
            if attn == "self_attention":
                return Attention(embed_dim, heads, proj_drop=drop_rate)
            return MultiHeadExternalAttention(embed_dim, heads, norm=norm, proj_drop=drop_rate)

        self.blocks = nn.Sequential(
            *(
                Block(
                    embed_dim,
                    attention(),
                    int(embed_dim * mlp_ratio),
                    norm_mlp=norm_mlp,
                    dropout=drop_rate,
                    drop_path=drop_path_rate * i / max(1, depth - 1),
                )
                for i in range(depth)
            )
        )
        self.norm = nn.LayerNorm(embed_dim)
        self.head = _classifier(embed_dim, num_classes)
        trunc_normal_(self.cls_token, std=0.02)
        self.apply(_start)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """``(B, in_chans, H, W) -> (B, 1 + H * W / 256, C)``: the class token, then the image's, normed."""
        x = self.pos_drop(self.embed(self.tokens(x)))
        for block in self.blocks:
            x = checkpointed(block, [block], x) if self.grad_checkpointing and self.training else block(x)
        return self.norm(x)

    def tokens(self, x: Tensor) -> Tensor:
        """``(B, in_chans, H, W) -> (B, H * W / 256, C)``, by the stem."""
        if x.ndim != 4 or x.shape[1] != self.in_chans:
            raise InputError(f"x is {tuple(x.shape)}; images are (B, {self.in_chans}, H, W)")
        height, width = x.shape[2:]
        if (height, width) != self.img_size:
            raise InputError(
                f"x is {tuple(x.shape)}; this network is for images of {self.img_size[0]}x{self.img_size[1]}: "
                f"build it with img_size={height if height == width else (height, width)}"
            )
        return self.stem(x)

    def embed(self, x: Tensor) -> Tensor:
        """``(B, N, C) -> (B, 1 + N, C)``: the class token before the others, and to each its position."""
        first = self.cls_token.expand(x.shape[0], -1, -1)  # not len(x), which a graph for any batch can't hold
        return torch.cat((first, x), 1) + self.pos_embed

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """``(B, N, C) -> (B, num_classes)``, or ``(B, C)``: of the class token."""
        return x[:, 0] if pre_logits else self.head(x[:, 0])

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier, or none for 0 classes.

        Raises:
            InputError: Another pooling than the class token.
        """
        if global_pool not in (None, "token"):
            raise InputError(f"global_pool is {global_pool!r}; EAMLP classifies its class token: 'token'")
        self.num_classes = num_classes
        self.head = _classifier(self.embed_dim, num_classes).to(self.cls_token)
        self.head.apply(_start)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Computes the blocks again in the backward pass instead of keeping what is inside them."""
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm's optimisers don't decay, beside norms and biases."""
        return {"cls_token"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """For timm's layer decay."""
        return {"stem": r"^stem|^cls_token", "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]}


def sinusoid_table(positions: int, width: int) -> Tensor:
    r"""``(positions, width)``: :math:`\sin` at even places, :math:`\cos` at odd ones, of
    :math:`n / 10000^{2 \lfloor i / 2 \rfloor / C}`.

    Example:
        >>> sinusoid_table(3, 4)[:2]
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0100, 0.9999]])
    """
    place = torch.arange(width)
    period = 10000 ** (2 * (place // 2).double() / width)
    angle = torch.arange(positions)[:, None] / period
    return torch.where(place % 2 == 0, angle.sin(), angle.cos()).to(torch.get_default_dtype())


def _restore_table(net: nn.Module, _keys: object) -> None:
    """A network that was made without memory gets its table with its weights, which hold none."""
    assert isinstance(net, EAMLP)
    net.pos_embed = sinusoid_table(net.pos_embed.shape[1], net.embed_dim)[None].to(net.cls_token)


def _classifier(width: int, num_classes: int) -> nn.Module:
    return nn.Linear(width, num_classes) if num_classes > 0 else nn.Identity()


def _start(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


_CONFIG = {
    "url": "",
    "num_classes": 1000,
    "input_size": (3, 224, 224),
    "fixed_input_size": True,
    "crop_pct": 0.9,
    "interpolation": "bicubic",
    "mean": IMAGENET_DEFAULT_MEAN,
    "std": IMAGENET_DEFAULT_STD,
    "classifier": "head",
}
# timm looks here when a name is registered.
default_cfgs = {f"eamlp_{depth}": _CONFIG for depth in (7, 10, 12, 14, 19, 24)}


def _create(name: str, pretrained: bool, arguments: dict[str, Any], **size: Any) -> EAMLP:
    """What timm calls for a registered name."""
    given = (arguments.get("pretrained_cfg"), arguments.get("pretrained_cfg_overlay"))
    if pretrained and not resolve_pretrained_cfg(name, *given).has_weights:
        raise InputError(
            f"no published weights of {name} are known to be fetchable: checkpoint_path=PATH loads a file of this "
            "network, lineattn.models.eamlp_published.load_published(net, PATH) one of the published code"
        )
    if arguments.get("features_only"):
        raise InputError(f"{name} has tokens of one size: it makes no pyramid, so leave out features_only")
    return build_model_with_cfg(EAMLP, name, pretrained, **{**size, **arguments})


@register_model
def eamlp_7(pretrained: bool = False, **arguments: Any) -> EAMLP:
    """EAMLP-7."""
    return _create("eamlp_7", pretrained, arguments, embed_dim=256, depth=7, heads=4, mlp_ratio=2.0)


@register_model
def eamlp_10(pretrained: bool = False, **arguments: Any) -> EAMLP:
    """Of the published code, without a figure in the paper."""
    return _create("eamlp_10", pretrained, arguments, embed_dim=256, depth=10, heads=4, mlp_ratio=2.0)


@register_model
def eamlp_12(pretrained: bool = False, **arguments: Any) -> EAMLP:
    """Of the published code, without a figure in the paper."""
    return _create("eamlp_12", pretrained, arguments, embed_dim=256, depth=12, heads=4, mlp_ratio=2.0)


@register_model
def eamlp_14(pretrained: bool = False, **arguments: Any) -> EAMLP:
    """EAMLP-14."""
    return _create("eamlp_14", pretrained, arguments, embed_dim=384, depth=14, heads=6, mlp_ratio=3.0)


@register_model
def eamlp_19(pretrained: bool = False, **arguments: Any) -> EAMLP:
    """EAMLP-19."""
    return _create("eamlp_19", pretrained, arguments, embed_dim=448, depth=19, heads=7, mlp_ratio=3.0)


@register_model
def eamlp_24(pretrained: bool = False, **arguments: Any) -> EAMLP:
    """Of the published code, without a figure in the paper."""
    return _create("eamlp_24", pretrained, arguments, embed_dim=512, depth=24, heads=8, mlp_ratio=3.0)
