"""Controllers: pure functions from gathered statistics to a decision that every rank reaches alike.

Batch policies share the global batch. `hetopt.core.run_spec.BATCH_POLICIES` says what each does; `choose` makes the one
that a run asks for, and registers others.

`learning_rate` holds the rules by which the learning rate follows the global batch.
"""
