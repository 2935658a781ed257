"""Parameters, gradients or optimizer state in parts, one on each rank: `fsdp` and `ddp_sharded`."""
