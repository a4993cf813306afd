"""The command line: one file a command, each reading artifacts, calling one function below and writing one artifact."""
