"""Frameworks on unequal workers, against the real libraries."""
