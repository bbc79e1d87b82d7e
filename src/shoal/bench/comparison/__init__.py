"""Strategies compared: the runs, the words, the pictures and the report."""
