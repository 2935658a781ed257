"""`.dcp`: checkpoints as folders to which every rank writes its part."""
