"""What both ways of running a script on unequal workers share: a session, and DistributedDataParallel as it is."""
