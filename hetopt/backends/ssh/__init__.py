"""Machines that the user owns, reached by the system's OpenSSH."""
