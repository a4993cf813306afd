"""The tasks that ship with hetopt; `hetopt.core.run_rules` has their names."""
