"""What a run will cost: the bill term by term, machines that are taken back included."""
