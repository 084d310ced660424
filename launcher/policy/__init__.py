"""Pure: what has happened in, what to do next out."""
