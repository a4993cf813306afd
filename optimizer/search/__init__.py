"""Which cluster is the best: all that could be rented, what rules most out, and what is searched beyond that."""
