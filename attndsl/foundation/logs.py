"""The logger ``attndsl``: compilation, caching, and the choice of kernels with its reasons.

``ATTNDSL_LOG`` prints it on stderr. Programs that set up :mod:`logging` themselves need no
variable: the logger is an ordinary one.
"""

from __future__ import annotations

import logging
import sys

from attndsl.settings import LOG_LEVELS, log_level

from .caches import memoised

LOG = logging.getLogger("attndsl")
_FORM = "attndsl %(asctime)s.%(msecs)03d %(levelname)-7s %(message)s"
_TIME = "%H:%M:%S"


class _Plain(logging.Handler):
    """Handler that prints lines on stderr, unless the root logger has handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or sys.stderr is None:
            return
        print(self.format(record), file=sys.stderr, flush=True)


def set_up() -> None:
    """Print the log as the environment says."""
    name = log_level()
    if not name:
        return
    handler = _Plain()
    handler.setFormatter(logging.Formatter(_FORM, _TIME))
    LOG.addHandler(handler)
    if name in LOG_LEVELS:
        LOG.setLevel(name.upper())
    else:
        LOG.warning("ATTNDSL_LOG is %r: write %s or off", name[:40], ", ".join(LOG_LEVELS))


@memoised("texts that were logged", 4096)
def tell_once(text: str) -> None:
    """Log ``text`` for information, the first time of many."""
    LOG.info("%s", text)
