"""Pictures and tables, whose public names are in `fitkit.pictures`."""
