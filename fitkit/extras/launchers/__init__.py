"""What starts the ranks of a run: worker processes, and the script itself, started again."""
