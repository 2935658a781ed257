"""What each rank reads: its shard of the data, in an order that all follow."""
