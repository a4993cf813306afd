"""Goes on when workers are lost or come back: survivors keep their state, and meet the others again."""
