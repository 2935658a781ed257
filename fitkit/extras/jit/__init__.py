"""`jit_compile`: steps, evaluations and updates compiled by torch."""
