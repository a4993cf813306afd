"""How often a rented machine reads from and writes to the bucket of its run: machines do it, and the bill counts it."""

PLACEMENT_OBJECT = "placement.json"
LEASE_OBJECT = "lease.json"

READ_OFTEN = (LEASE_OBJECT, PLACEMENT_OBJECT)
READ_EVERY_S = 5.0
"""How often a machine looks for news."""

HEARTBEAT_S = 15.0
"""How often a machine writes that it lives."""
