"""Executors: what computes a scheduled step."""
