"""Measuring Shoal.

The commands are `throughput`, `serve`, `compare` and `tune`. Below them:

- `workloads`: what is asked, and when.
- `client`: the load generator.
- `runs`: a workload run once, on an engine in this process or on a server.
- `results`: the definitions of the figures, and how they are told.
- `comparison`, `tuning`: what the commands of these names do with many runs.
"""
