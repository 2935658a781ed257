"""Starts the simulated GPUs in every process that finds this folder first on its path."""

import os

if os.environ.get("SIM_LIBRARY"):
    import simulation

    simulation.install()
