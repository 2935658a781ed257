"""Whether the numbers of a model and its data are the same however a batch is cut."""
