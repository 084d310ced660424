"""`python -m launcher` is the same program as the console script `ftlaunch`."""

from launcher.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
