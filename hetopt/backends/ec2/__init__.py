"""EC2: what the renter does, what a rented machine does, and what they write to each other."""
