"""Training that goes on when workers are lost or come back: survivors keep their state and form a new group."""
