"""For code that observes requests and must never fail one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec

logger = logging.getLogger(__name__)
P = ParamSpec("P")


def never_fails(method: Callable[P, None]) -> Callable[P, None]:
    """Log what `method` raises instead of raising it; only the first time, it may come often."""
    reported = False

    @functools.wraps(method)
    def safe(*args: P.args, **kwargs: P.kwargs) -> None:
        nonlocal reported
        try:
            method(*args, **kwargs)
        except Exception:
            if not reported:
                reported = True
                logger.exception("the metric '%s' could not be recorded", method.__name__)

    return safe
