"""ftlaunch: keeps a fine-tuning job alive where machines come and go."""

__version__ = "0.1.0"
