"""For code that observes requests and must never fail one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


def never_fails(method: Callable[P, R | None]) -> Callable[P, R | None]:
    """Log what `method` raises and return None instead; only the first time, it may come often."""
    reported = False

    @functools.wraps(method)
    def safe(*args: P.args, **kwargs: P.kwargs) -> R | None:
        nonlocal reported
        try:
            return method(*args, **kwargs)
        except Exception:
            if not reported:
                reported = True
                logger.exception("the metric '%s' could not be recorded", method.__name__)
            return None

    return safe
