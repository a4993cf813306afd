"""Shared by both ways of running a script on unequal workers, in a session and by DistributedDataParallel as it is."""
