"""A run as one HTML page that needs nothing else: what it did over time, and how that compares with what was said."""
