"""Step time of any layout from a few measured ones: physics with priors, what that leaves over, and how sure it is."""
