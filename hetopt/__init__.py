"""Choose and run the cheapest, fastest cluster for distributed training on unequal, interruptible machines."""
