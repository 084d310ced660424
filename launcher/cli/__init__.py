"""The command line: one module a command; argument in, exit code out, nothing else."""
