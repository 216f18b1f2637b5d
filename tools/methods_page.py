"""Writes docs/methods.md from the methods' cards and docstrings; with --check, only says whether it differs.

A new method is on the page by being registered.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path

from lineattn import registry
from lineattn.cli.compare import markdown
from lineattn.registry import Card

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
_HEAD = """# The methods

`lineattn show NAME` prints a method's arguments too. Written by `make docs` from the code.
"""
_DEPTH = """# Attention over depth

`lineattn.attach(net, NAME)` puts one into a network. Time and state are those of a network of L layers. "Needs":
whether blocks have to fall into branch and shortcut, which [backbones.md](backbones.md) says of each family.
"""
_SAMPLE = """# Attention over the positions of a sample

`lineattn.swap(net, "blocks.*.attn", NAME)` puts one in the place of a network's attention;
`lineattn.attach(net, NAME, at="layer4")` puts those that are blocks behind a module. Time is that of N positions.
"""
_TOKEN = """# Attention over the tokens of a sequence

Layers, `lineattn.nn.token`: each takes `(B, T, C)` and a state, and goes on from it a token at a time (`step`). Time
and state are those of T tokens. "Made of": what queries, keys, values and decays are; `input` is a map of the token.
"""


def page() -> str:
    """The page: an axis after the other, with a table and one section a method."""
    parts = [_HEAD.strip()]
    for axis, head, column, value in (
        ("depth", _DEPTH, "needs", _needs),
        ("sample", _SAMPLE, "stands", _stands),
        ("token", _TOKEN, "made of", _made_of),
    ):
        cards = [registry.get(name) for name in registry.list_methods(axis)]
        rows = [
            {
                "name": f"[`{card.name}`](#{_anchor(card)})",
                "method": card.title,
                "time": card.cost,
                "state": card.state,
                column: value(card),
                "paper": _paper(card),
            }
            for card in cards
        ]
        sections = [f"## {card.title} (`{card.name}`)\n\n{_text(card)}" for card in cards]
        table = markdown(rows, list(rows[0])).replace("---:", "---")  # words, not numbers
        parts += [head.strip(), table, *sections]
    return "\n\n".join(parts) + "\n"


def _anchor(card: Card) -> str:
    heading = f"{card.title} {card.name}".lower()
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")


def _needs(card: Card) -> str:
    if card.cls.position == "branch":
        return "branch"
    return "shortcut" if card.cls.needs_shortcut else "output only"


def _stands(card: Card) -> str:
    return "behind a module" if card.cls.residual else "for a transformer's attention"


def _made_of(card: Card) -> str:
    return str(card.cls.row)


def _paper(card: Card) -> str:
    return f"{card.paper}, [arXiv {card.arxiv}](https://arxiv.org/abs/{card.arxiv})" if card.arxiv else card.paper


def _text(card: Card) -> str:
    """The class's docstring up to its arguments, with equations as GitHub shows them."""
    text = inspect.getdoc(card.cls) or ""
    text = re.split(r"\n(?:Args|Shape|Raises|Example|Reference):\n", text)[0]
    text = text.replace("``", "`")
    text = re.sub(r"\.\. math::[ ]?((?:[^\n]|\n(?=[ ]|\n[ ]))*)", _equation, text)
    text = re.sub(r":math:`([^`]*)`", r"$\1$", text)
    text = re.sub(r"^Note:\n((?:    .*\n?|\n)*)", lambda m: "*Note.* " + textwrap.dedent(m[1]), text, flags=re.M)
    start = getattr(card, "start", "")
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    return "\n\n".join([text, *([f'At step 0, with `init="paper"`: {start}.'] if start else [])])


def _equation(found: re.Match[str]) -> str:
    return f"```math\n{textwrap.dedent(found[1]).strip()}\n```\n"


def main(args: list[str]) -> int:
    text = page()
    if args == ["--check"]:
        if not PAGE.exists() or PAGE.read_text() != text:
            print(f"{PAGE.name} is not what the code says: run `make docs`")
            return 1
        return 0
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
