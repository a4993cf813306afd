"""A cluster emulated on this machine: a network namespace for each host, with links at their rates."""
