"""Before anything is started: facts in, findings out. `checks.run_checks` is the door; every check is pure."""
