"""Where am I: environment names of each platform."""
