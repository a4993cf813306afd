"""Controllers: pure functions from gathered statistics to a decision that every rank reaches alike.

`policy` divides the global batch. `hetopt.core.run_spec.BATCH_POLICIES` says what each policy does;
`policy.choose_policy` makes the one that a run asks for, and `policy.register` adds others.

`ratio` decides how much of the gradient is sent.
"""
