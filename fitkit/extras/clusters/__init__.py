"""What schedulers and launchers other than torchrun tell the processes that they start."""

FIRST_PORT, PORTS = 15000, 17000
"""Where job numbers become ports: above the registered services in use, below Linux's first
ephemeral port (32768), which an outgoing connection might hold."""


def port_of(number: int) -> int:
    """Return the port at which the ranks of a job or step of this number meet."""
    return FIRST_PORT + number % PORTS
