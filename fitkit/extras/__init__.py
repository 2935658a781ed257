"""What a reader of the core needn't know: each file is one capability, imported when asked for."""
