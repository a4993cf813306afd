"""The process that hosts a machine's workers, and the rendezvous by which the hosts of a run find each other."""
