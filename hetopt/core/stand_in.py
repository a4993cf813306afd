"""What trains in the place of a job that this machine cannot train: how much it exchanges, and what it is called."""

from __future__ import annotations

STAND_IN = "stand-in"
"""The bundled task."""

PARAMETERS = 250_000
"""In single precision: a gradient of 1 MB. Links are scaled to it, so that a step exchanges as long as the job's would:
110 million parameters over 10 Gbit/s are as slow as 1 MB over 23 Mbit/s, which a network on a few cores carries."""

LAYERS = 10
"""Its parameters are so many vectors of one length: a real gradient does not come at once either."""

SHAPES = ((PARAMETERS // LAYERS,),) * LAYERS
GRADIENT_BYTES = 4 * PARAMETERS
