"""A workload run once, on an engine in this process or on a server."""
