"""Errors that a user can mend.

Whoever finds bad input raises `InputError` with one line: what is wrong, where (the file, the argument), and what
to do. The command line prints that line and exits with 2; in Python it is an ordinary `ValueError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib.util import find_spec


class InputError(ValueError):
    """Bad input: one line that says what, where, and what to do about it."""


def unknown(kind: str, name: object, known: Iterable[str]) -> InputError:
    """The error for a name that is not known, with the nearest ones that are.

    Args:
        kind: What the name was looked up as, in the singular ("model", "task").
        name: The name that was given.
        known: The names that would have been accepted.

    Example:
        >>> str(unknown("method", "kcal", ["kcla", "mrla_light"]))
        "unknown method 'kcal': did you mean 'kcla'? (known: kcla, mrla_light)"
    """
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    shown = ", ".join(names[:12]) + (f", ... {len(names)} in all" if len(names) > 12 else "")
    return InputError(f"unknown {kind} {name!r}: {hint}(known: {shown})")


def need(module: str, extra: str, what: str) -> None:
    """Says before long work that a package is not installed, and which extra brings it.

    Raises:
        InputError: It is not installed.
    """
    if find_spec(module) is None:
        raise InputError(f"{what} needs the {extra} extra: pip install 'lineattn[{extra}]'")
