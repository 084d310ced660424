"""Messages between the agents of a run: HTTP/1.1 with the run's token, in the agent's one thread."""
