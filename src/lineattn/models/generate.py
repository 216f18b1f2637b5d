"""Text from a language model, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lineattn.errors import InputError
from lineattn.models.language import LanguageModel


@torch.no_grad()
def generate(
    net: LanguageModel,
    prompt: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Tokens that come after a prompt, without end.

    The prompt is read at once; each further token is one step from the states, so memory grows as these do: for
    recurrences, not at all.

    Args:
        net: The model, in evaluation mode.
        prompt: ``(B, T)``, at least one token.
        temperature: What logits are divided by; 0 takes the likeliest token always.
        top_k: Choose among so many of the likeliest alone; 0 is all.
        top_p: Choose among the likeliest that have this probability together.
        seed: Seed of the choices.

    Yields:
        The next token of each row, ``(B,)``.

    Raises:
        InputError: A number out of its range, or no prompt.

    Example:
        >>> net = LanguageModel(256, 32, 1, mixer_args={"heads": 2}).eval()
        >>> tokens = generate(net, torch.zeros(1, 1, dtype=torch.long), temperature=0)
        >>> next(tokens).shape
        torch.Size([1])
    """
    for name, value, good in (
        ("temperature", temperature, temperature >= 0),
        ("top_k", top_k, top_k >= 0),
        ("top_p", top_p, 0 < top_p <= 1),
    ):
        if not good:
            raise InputError(f"{name} is {value}: temperature and top_k are 0 or more, top_p is above 0 and at most 1")
    if prompt.ndim != 2 or not prompt.shape[1]:
        raise InputError(f"prompt is {tuple(prompt.shape)}; it is (B, T) with at least one token")
    return _tokens(net, prompt, temperature, top_k, top_p, torch.Generator(prompt.device).manual_seed(seed))


@torch.no_grad()
def _tokens(
    net: LanguageModel, tokens: Tensor, temperature: float, top_k: int, top_p: float, draws: torch.Generator
) -> Iterator[Tensor]:
    states = None
    while True:
        logits, states = net(tokens, states, keep=1)
        chosen = choose(logits[:, -1].float(), temperature, top_k, top_p, draws)
        yield chosen
        tokens = chosen[:, None]


def choose(logits: Tensor, temperature: float, top_k: int, top_p: float, draws: torch.Generator) -> Tensor:
    """A token by the logits ``(B, V)``, ``(B,)``.

    Example:
        >>> choose(torch.tensor([[0.0, 2.0, 1.0]]), 1.0, 1, 1.0, torch.Generator())
        tensor([1])
    """
    if temperature == 0:
        return logits.argmax(-1)
    ordered, places = logits.sort(-1, descending=True)
    probabilities = (ordered / temperature).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    left_out = before >= top_p  # the likeliest is never
    if top_k:
        left_out[:, top_k:] = True
    drawn = torch.multinomial(probabilities.masked_fill(left_out, 0), 1, generator=draws)
    return places.gather(1, drawn)[:, 0]
