# Under its short name every module would exist twice, and an error of one be unknown to the other.
if __name__ == "loadtests":
    raise ImportError("Import crossover.loadtests: this folder is part of the package crossover.")
