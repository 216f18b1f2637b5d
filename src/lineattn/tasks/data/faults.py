"""What is wrong with the files of a data set as a whole, as one line that names a few of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lineattn.errors import InputError

_SHOWN = 3  # files that are named of those with one fault


class Fault(InputError):
    """What is wrong with several items of a data set: one line that names a few of them.

    Args:
        kind: Its name, for programs.
        before: What the line says before the names.
        items: All names.
        of: What an item is, in the singular.
        after: What the line says after the names.
    """

    def __init__(self, kind: str, before: str, items: Sequence[str], of: str, after: str) -> None:
        super().__init__(f"{before}{some(items)}{after}")
        self.kind, self.before, self.items, self.of, self.after = kind, before, list(items), of, after


OnFault = Callable[[InputError], None]  # what is done with a fault, before what is left of the data set is looked at


def stop(fault: InputError) -> None:
    """Raises the fault."""
    raise fault


def some(names: Sequence[str]) -> str:
    """The first few of many names.

    Example:
        >>> some(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
