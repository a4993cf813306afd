"""EC2 in a box: what a moto server says is running runs, as hosts of a rehearsed network that boot by their user data.

The API, its store of objects and its records are moto's own, in a process on the box's network. Each instance is a
network namespace in which its real user data is executed as it would be on a machine. Programs that only a whole
machine has (`shutdown`, `systemctl`, `aws`) are small real ones, and it has a metadata service of its own.
"""
