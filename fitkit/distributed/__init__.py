"""Where a run happens: devices, launchers, strategies, precision."""
