"""Trains on unequal, interruptible machines. Importing the package itself does not import torch."""
