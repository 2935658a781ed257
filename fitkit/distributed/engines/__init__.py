"""Engines of other projects that ranks can learn by, each behind an extra."""
