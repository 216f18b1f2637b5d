"""Settings out of their range are one line."""

from __future__ import annotations

from lineattn.errors import InputError


def require(holds: bool, option: str, value: object, wanted: str) -> None:
    """Refuses the value of an option.

    Raises:
        InputError: It does not hold.

    Example:
        >>> require(0 < 0.1, "optim.lr", 0.1, "above 0")
    """
    if not holds:
        raise InputError(f"--{option} {value}: must be {wanted}")
