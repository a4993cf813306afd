"""What can be rented, where, at which price, and under which terms: the catalogue, narrowed and refreshed."""
