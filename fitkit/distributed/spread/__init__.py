"""What a rank keeps of optimizers' states and of parameters, and how the whole comes together."""
