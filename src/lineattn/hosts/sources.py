"""Where weights come from: a state dict, a file, timm or torchvision. No code that stands in a file is ever run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeAlias

from torch import Tensor

from lineattn.errors import InputError, unknown
from lineattn.files import load_torch

_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict")
_AVERAGED = "ema.module."  # in a checkpoint of ours, where the run kept averaged weights


@dataclass(frozen=True)
class Weights:
    """Tensors by name, as their source has them.

    Attributes:
        name: The source, for messages.
        tensors: The tensors.
        method: Registry name of the attention among them, where the source says it: in checkpoints of this library.
        arguments: What that method was given, in the same checkpoints.
    """

    name: str
    tensors: dict[str, Tensor]
    method: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


Source: TypeAlias = str | Path | Mapping[str, Any] | Weights


def read(source: Source) -> Weights:
    """Weights from a state dict or a file, or by name from timm or torchvision.

    Names are ``timm/resnet50.a1_in1k``, ``hf-hub:owner/repository`` (of a network of timm), ``torchvision/resnet50``
    and ``torchvision/ResNet50_Weights.IMAGENET1K_V2``; they are fetched, or taken from the cache of the library. Where
    a file keeps averaged weights beside the last ones, the averaged ones are read.

    Raises:
        InputError: The file is missing, no weights file, or a pickle of something else than weights; there are no such
            weights, or they can't be fetched.
    """
    if isinstance(source, Weights):
        return source
    if isinstance(source, Mapping):
        return _unwrap(source, "state dict")
    name = str(source)
    if Path(name).is_file():
        return _from_file(name)
    if name.startswith(("timm/", "hf-hub:")):
        return _from_timm(name)
    if name.startswith("torchvision/"):
        return _from_torchvision(name)
    raise InputError(f"{name}: no such file; give a weights file (.safetensors, .pth), timm/NAME or torchvision/NAME")


def _from_file(name: str) -> Weights:
    if not name.endswith(".safetensors"):
        return _unwrap(load_torch(name), name)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return Weights(name, load_file(name))
    except SafetensorError as error:
        raise InputError(f"{name}: not a whole safetensors file ({error})") from error


def _from_timm(name: str) -> Weights:
    """By timm's own loader: it finds the file, reads it safely and brings old formats to the layout of today."""
    import timm
    from safetensors import SafetensorError

    model = name.removeprefix("timm/")
    if model == name:
        where = f"https://huggingface.co/{name.removeprefix('hf-hub:')}"
    else:
        if not timm.is_model(model):
            raise unknown("weights", name, [f"timm/{known}" for known in timm.list_pretrained()])
        if not timm.is_model_pretrained(model):
            tags = timm.list_pretrained(f"{model.partition('.')[0]}.*")
            has = (
                f"those it has: {', '.join(f'timm/{tag}' for tag in tags)}" if tags else "it has none for this network"
            )
            raise InputError(f"{name}: timm has no such weights; {has}")
        config = timm.get_pretrained_cfg(model)
        assert config is not None
        where = f"https://huggingface.co/{config.hf_hub_id}" if config.hf_hub_id else str(config.url)
    try:
        return Weights(name, timm.create_model(model, pretrained=True).state_dict())
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:  # a ValueError: no name of a repository
        raise _unfetched(name, where, error) from error


def _from_torchvision(name: str) -> Weights:
    import torch
    from torchvision.models import get_model_weights, get_weight, list_models

    given = name.removeprefix("torchvision/")
    try:
        weights: Any = get_weight(given) if "." in given else get_model_weights(given).DEFAULT  # type: ignore[attr-defined]
    except (ValueError, KeyError, AttributeError) as error:
        raise unknown("weights", name, [f"torchvision/{known}" for known in list_models()]) from error
    progress = sys.stderr.isatty()
    try:
        state = weights.get_state_dict(progress=progress, check_hash=True, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise _unfetched(
            name, weights.url, error, f" or put the file into {torch.hub.get_dir()}/checkpoints"
        ) from error
    return Weights(name, state)


def _unfetched(name: str, where: str, error: Exception, cache: str = "") -> InputError:
    reason = type(error).__name__
    if not isinstance(error, UnpicklingError):  # which would advise to run what is in the file
        reason = f"{reason}: {' '.join(str(error).split())}"
    return InputError(
        f"{name}: the weights can't be fetched or read ({reason}); get them from {where} another way and give the "
        f"path of the file as the trunk (--model.trunk PATH){cache}"
    )


def _unwrap(content: Any, name: str) -> Weights:
    attention = _attention(content)
    while isinstance(content, Mapping):
        inner = next((content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            tensors = {key: value for key, value in content.items() if isinstance(value, Tensor)}
            averaged = {key: value for key, value in tensors.items() if key.startswith(_AVERAGED)}
            if tensors:
                return Weights(name, averaged or tensors, *attention)
            break
        content = inner
    raise InputError(f"{name}: holds no state dict; it should map names to tensors")


def _attention(content: Any) -> tuple[str | None, Mapping[str, Any]]:
    """The method that a checkpoint of `lineattn.tasks.checkpoint` was trained with, and its arguments."""
    for key in ("lineattn", "config", "model"):
        content = content.get(key) if isinstance(content, Mapping) else None
    if not isinstance(content, Mapping) or not isinstance(content.get("attn"), str):
        return None, {}
    arguments = content.get("attn_args")
    return content["attn"], arguments if isinstance(arguments, Mapping) else {}
