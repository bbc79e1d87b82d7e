"""Errors of the benchmarks that are no wrong setting."""


class BenchError(Exception):
    """The server can't be measured; the message says what it answered."""
