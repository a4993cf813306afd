"""EC2: the renter of machines, the agent of a rented machine, and the objects that they write to each other."""
