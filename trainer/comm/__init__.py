"""How workers agree on one gradient: compressors, memories and collectives, composed."""
