# Under its short name every module would exist twice, and an error of one be unknown to the other.
if __name__ == "models":
    raise ImportError("Import crossover.models: this folder is part of the package crossover.")
