"""Where a plan can run here, and what it takes there: this machine, or a miniature of its cluster."""
