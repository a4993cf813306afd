"""The sum of gradients over workers: compressors, error feedback and collectives, and how they are composed."""
