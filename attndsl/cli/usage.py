"""The error of a wrongly used command."""

from __future__ import annotations

from attndsl.errors import AttnDSLError


class UsageError(AttnDSLError):
    """The command itself was used wrongly: exit code 2."""
