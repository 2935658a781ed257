"""The training loop: what a compile decided, sessions, loops, logs."""
