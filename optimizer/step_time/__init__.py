"""Step time of any cluster layout from a few measured ones, with its uncertainty: equations, priors and residuals."""
