"""A cluster emulated on this machine: a network namespace a host, links at their rates."""
