"""The error of a wrongly used command, and of one whose extra is not installed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from attndsl.errors import AttnDSLError, UnsupportedError

if TYPE_CHECKING:
    from types import ModuleType


class UsageError(AttnDSLError):
    """The command itself was used wrongly: exit code 2."""


def module_of_extra(module: str, what: str, extra: str) -> ModuleType:
    """A module of attndsl that needs the packages of an extra.

    Args:
        module: Its dotted name.
        what: What needs which packages, for the error.
        extra: Which extra has them.

    Raises:
        UnsupportedError: They are not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("attndsl"):
            raise
        lacking = error.name.partition(".")[0]
        raise UnsupportedError(
            f"{what}, and there is no module '{lacking}'", hint=f"pip install 'attndsl[{extra}]'"
        ) from error
