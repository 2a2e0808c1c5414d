"""The families of models that a worker can run, one folder for each family."""
