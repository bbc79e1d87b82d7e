"""What a run is told in: figures, the machine, and what disturbed it."""
