"""Checkpoints on disk: manifest, commit, verification, choice, pruning. Imports no torch."""
