"""One agent per node: starts, watches and ends the ranks. Small, single-threaded, imports no torch."""
