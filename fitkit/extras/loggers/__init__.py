"""Loggers, which users import from `fitkit.loggers`."""
