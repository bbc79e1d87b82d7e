"""Measuring Shoal: workloads, the definitions of the figures, and the benchmarks themselves."""
