"""The library behind the command line: profile a job, recommend a cluster, launch it, report. `hetopt` exports it."""
