"""A job in virtual time: the same policies as live, on a cluster that is data. Loads neither torch nor zmq."""
