"""Scripts that use DistributedDataParallel, unchanged, on unequal workers."""
