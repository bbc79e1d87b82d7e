"""Finds the strategy and the limits that suit a workload, by measuring."""
