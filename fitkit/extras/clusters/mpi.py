"""The mpirun of Open MPI, and the mpiexec of MPICH, Intel and Cray."""

from __future__ import annotations

from fitkit.seams.machines import Cluster, Environment, LaunchVariables


def read_openmpi(environment: Environment) -> Cluster:
    """Return this process's place as Open MPI's variables say it."""
    # OMPI_COMM_WORLD_NODE_RANK is a rank on the node, not the node's.
    read = LaunchVariables(environment, "Open MPI's mpirun", "OMPI_COMM_WORLD_RANK")
    return read.place(
        "openmpi",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    )


def read_pmi(environment: Environment) -> Cluster:
    """Return this process's place as the variables of a process manager (PMI) say it."""
    read = LaunchVariables(environment, "mpiexec", "PMI_RANK")
    return read.place(
        "pmi",
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    )
