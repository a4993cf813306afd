"""What became of a run, and how it is told: on a page, in a terminal, to other tools and to the profile."""
