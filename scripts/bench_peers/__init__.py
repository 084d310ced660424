"""`make bench`: ftlaunch and other launchers on the same job of this machine, in turn. See docs/benchmarks.md."""
