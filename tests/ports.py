"Ports for tests: from the system, and kept from everybody else until this process ends."

import socket

_held = []


def free_port() -> int:
    """A port that the system hands to nobody else: the socket that has it stays open.

    It does not listen: whoever calls is refused, and whoever may use an address again, as torch's store and Python's
    servers do, can listen there. A port that is let go of in between goes to another process now and then.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    return holder.getsockname()[1]
