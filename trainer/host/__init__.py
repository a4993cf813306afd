"""The process that hosts a machine's workers, and how the hosts of a run find each other."""
