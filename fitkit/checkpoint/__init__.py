"""Files: weights in HDF5, written whole or not at all."""
