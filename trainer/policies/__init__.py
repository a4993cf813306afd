"""Controllers: pure functions from gathered statistics to a decision that every rank reaches alike.

Batch policies share the global batch; `choose.choose_policy` makes the one that a run asks for.

- ``uniform``, ``static``: equal shares, or the plan's; never changed (`keep`).
- ``proportional``: in proportion to the throughput of the last epoch (`proportional`).
- ``dynamic``: the same each period, smoothed, with a dead-band and a growth cap (`dynamic`).
- ``omnilearn``: the same each epoch, with a wide dead-band and bounds (`dynamic`).
- ``allocation``: whole micro-batches in proportion to throughput, each epoch until the times agree (`allocation`).
- ``model``: the exact solution for the lines ``a + c b`` that the workers' times follow (`model`, `worker_line`).
- ``rate``: what each worker's stream brings in a set time; their sum changes (`stream_rate`).

`learning_rate` holds the rules by which the learning rate follows the global batch.
"""
