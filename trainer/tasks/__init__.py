"""The tasks that ship with hetopt; `hetopt.core.task_reference` has their names."""
