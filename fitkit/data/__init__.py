"""Data: anything that users pass, as a source of batches."""
