"""Runs inside the ranks (and the fork server): the only package that imports torch."""
