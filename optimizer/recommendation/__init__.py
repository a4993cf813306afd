"""From a profile and a wish to a plan with its reasons, or to the nearest that could be had."""
