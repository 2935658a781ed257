"""Many trainings: which settings are better, and whether it was luck."""
