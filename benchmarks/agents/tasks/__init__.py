"""A task a file: what an agent is told, the files it gets, and how its results are judged."""
