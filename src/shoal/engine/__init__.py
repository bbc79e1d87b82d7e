"""The engine: the loop, its process, and the way into and out of it."""
