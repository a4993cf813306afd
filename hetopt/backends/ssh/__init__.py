"""Machines that a person owns, reached by OpenSSH as the system has it."""
